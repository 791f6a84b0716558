//! Commands that call every server of a job: checkpoint, restore, resume, delete, drain.

use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Context;
use longshore_proto::{Fault, wire::v1};

use super::client::Servers;
use crate::session::{Checkpoint, TRIES, common, has_passed, is_taken, lead, numbered};

#[derive(clap::Args)]
pub(super) struct ServersArgs {
    /// The servers, in the order the job was opened with
    #[arg(
        long,
        env = "LONGSHORE_SERVERS",
        value_delimiter = ',',
        required = true,
        value_name = "HOST:PORT,..."
    )]
    pub(super) servers: Vec<String>,
}

#[derive(clap::Args)]
pub(super) struct JobArgs {
    #[command(flatten)]
    pub(super) servers: ServersArgs,
    /// The job [default: the only one there]
    #[arg(long)]
    pub(super) job: Option<String>,
}

#[derive(clap::Args)]
pub(super) struct CheckpointArgs {
    #[command(flatten)]
    pub(super) target: JobArgs,
    /// The checkpoint's name [default: from the version; for restore the newest]
    #[arg(long)]
    name: Option<String>,
}

#[derive(clap::Args)]
pub(super) struct ResumeArgs {
    #[command(flatten)]
    pub(super) target: JobArgs,
    /// Go on with this loss scale [default: the one the job paused with]
    #[arg(long)]
    loss_scale: Option<f64>,
}

#[derive(clap::Args)]
pub(super) struct StepBackArgs {
    #[command(flatten)]
    pub(super) target: JobArgs,
    /// The version before the newest
    #[arg(long)]
    version: u64,
}

/// Name of a checkpoint that the caller did not name.
pub(crate) fn checkpoint_name(version: u64) -> String {
    format!("step-{version:08}")
}

pub(super) fn checkpoint(args: &CheckpointArgs) -> anyhow::Result<()> {
    let (mut servers, job) = target(&args.target)?;
    let (mut tried, mut taken) = (0, 0);
    let (name, parts) = loop {
        let described = describe(&mut servers, &job)?;
        let newest = described.iter().filter_map(|d| Some(d.progress.as_ref()?.version)).max().unwrap_or(0);
        let version = newest + lead(tried);
        let free = || numbered(&checkpoint_name(version)).nth(taken);
        let Some(name) = args.name.clone().or_else(free) else {
            anyhow::bail!("every name for a checkpoint of version {version} is taken: choose one with --name")
        };
        let request =
            v1::CheckpointRequest { job: job.clone(), name: name.clone(), version, ..Default::default() };
        let parts = servers.each(|mut admin| {
            let request = request.clone();
            async move { admin.checkpoint(request).await }
        });
        match parts {
            Err(error) if tried < TRIES && error.downcast_ref().is_some_and(has_passed) => tried += 1,
            Err(error) if args.name.is_none() && error.downcast_ref().is_some_and(is_taken) => taken += 1,
            Err(error) => {
                discard(&mut servers, &job, &name);
                return Err(error);
            }
            Ok(parts) => break (name, parts),
        }
    };
    let seal = v1::SealCheckpointRequest {
        job: job.clone(),
        name: name.clone(),
        parts: parts.iter().map(|(_, answer)| answer.part.clone()).collect(),
    };
    let sealed = servers.each(|mut admin| {
        let seal = seal.clone();
        async move { admin.seal_checkpoint(seal).await }
    });
    let sealed = match sealed {
        Ok(sealed) => sealed,
        Err(error) => {
            discard(&mut servers, &job, &name);
            return Err(error);
        }
    };
    let version = parts.first().map_or(0, |(_, answer)| answer.version);
    say!("checkpoint {name} of version {version}");
    for (address, answer) in sealed {
        say!("  {address}: {}", answer.manifest);
        if answer.visible_parts < answer.parts {
            say!(
                "    with {} of {} parts: restored by the same servers only",
                answer.visible_parts,
                answer.parts
            );
        }
    }
    Ok(())
}

/// Gives back the room of the parts that were written. Where that fails the next checkpoint does it.
fn discard(servers: &mut Servers, job: &str, name: &str) {
    let request = v1::DiscardCheckpointRequest { job: job.to_string(), name: name.to_string() };
    let _ = servers.answers(|mut admin| {
        let request = request.clone();
        async move { admin.discard_checkpoint(request).await }
    });
}

pub(super) fn checkpoints(args: &JobArgs) -> anyhow::Result<()> {
    let (mut servers, job) = target(args)?;
    for Checkpoint { name, version, stale, damage, .. } in common_checkpoints(&mut servers, &job)? {
        let stale = if stale { "  stale: left behind when the job went back" } else { "" };
        let damage = damage.map(|damage| format!("  DAMAGED {damage}")).unwrap_or_default();
        say!("{name}  version {}{stale}{damage}", version.0);
    }
    Ok(())
}

pub(super) fn restore(args: &CheckpointArgs) -> anyhow::Result<()> {
    let (mut servers, job) = target(&args.target)?;
    let name = match &args.name {
        Some(name) => name.clone(),
        None => {
            let found = common_checkpoints(&mut servers, &job)?;
            found.last().map(|newest| newest.name.clone()).with_context(|| {
                format!("no checkpoint of job {job} is visible to every server: name one with --name, or look with `longshore checkpoints`")
            })?
        }
    };
    let request = v1::RestoreRequest { job: job.clone(), name: name.clone() };
    let answers = servers.answers(|mut admin| {
        let request = request.clone();
        async move { admin.restore(request).await }
    });
    let (mut restored, mut failure) = (Vec::new(), None);
    for (address, answer) in answers {
        match answer {
            Ok(answer) => restored.push((address, answer.progress.map_or(0, |progress| progress.version))),
            Err(fault) => failure = failure.or(Some(anyhow::Error::from(fault).context(address))),
        }
    }
    let version = restored.first().map_or(0, |(_, version)| *version);
    if failure.is_none() && restored.iter().any(|(_, other)| *other != version) {
        let versions: Vec<_> =
            restored.iter().map(|(at, version)| format!("{at} at version {version}")).collect();
        failure =
            Some(anyhow::anyhow!("checkpoint {name} is not the same everywhere: {}", versions.join(", ")));
    }
    if let Some(failure) = failure {
        let restored: Vec<String> = restored.into_iter().map(|(address, _)| address).collect();
        return Err(take_back(&mut servers, &job, &restored, failure));
    }
    say!("restored {name}: version {version}");
    Ok(())
}

/// Deletes the job where a restore was done that failed elsewhere: a job with a part of its state would stand in the way of
/// the next one.
fn take_back(servers: &mut Servers, job: &str, restored: &[String], failure: anyhow::Error) -> anyhow::Error {
    if restored.is_empty() {
        return failure;
    }
    let request = v1::DeleteJobRequest { job: job.to_string() };
    let deleted = servers.answers_of(restored, |mut admin| {
        let request = request.clone();
        async move { admin.delete_job(request).await }
    });
    let say = |(address, deleted): (String, Result<_, Fault>)| match deleted {
        Ok(_) => address,
        Err(fault) => format!("{address} (which failed: {fault}; delete it there)"),
    };
    let undone: Vec<String> = deleted.into_iter().map(say).collect();
    failure.context(format!(
        "the restore of job {job} was taken back, and the job deleted again, on {}. Put the cause right, then open the job \
         (the workers' command does) and restore it again. The cause",
        undone.join(", ")
    ))
}

pub(super) fn resume(args: &ResumeArgs) -> anyhow::Result<()> {
    let (mut servers, job) = target(&args.target)?;
    let request = v1::ResumeRequest { job, loss_scale: args.loss_scale.unwrap_or(0.0) };
    servers.each(|mut admin| {
        let request = request.clone();
        async move { admin.resume(request).await }
    })?;
    say!("resumed");
    Ok(())
}

pub(super) fn step_back(args: &StepBackArgs) -> anyhow::Result<()> {
    let (mut servers, job) = target(&args.target)?;
    let incarnation = SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |now| now.as_micros() as u64);
    let request = v1::StepBackRequest { job, incarnation, version: args.version };
    servers.each(|mut admin| {
        let request = request.clone();
        async move { admin.step_back(request).await }
    })?;
    say!("version {}", args.version);
    Ok(())
}

pub(super) fn delete(args: &JobArgs) -> anyhow::Result<()> {
    // Never the only one there: what is deleted must be named.
    let job = args.job.clone().context("name the job to delete with --job")?;
    let mut servers = Servers::connect(&args.servers.servers)?;
    let request = v1::DeleteJobRequest { job: job.clone() };
    servers.each(|mut admin| {
        let request = request.clone();
        async move { admin.delete_job(request).await }
    })?;
    say!("deleted {job}");
    Ok(())
}

pub(super) fn drain(args: &ServersArgs) -> anyhow::Result<()> {
    let mut servers = Servers::connect(&args.servers)?;
    servers.each(|mut admin| async move { admin.drain(v1::DrainRequest {}).await })?;
    say!("draining");
    Ok(())
}

fn target(args: &JobArgs) -> anyhow::Result<(Servers, String)> {
    let mut servers = Servers::connect(&args.servers.servers)?;
    let job = servers.job(args.job.as_ref())?;
    Ok((servers, job))
}

fn describe(servers: &mut Servers, job: &str) -> anyhow::Result<Vec<v1::DescribeResponse>> {
    let request = v1::DescribeRequest { job: job.to_string(), state_hash: false };
    let answers = servers.each(|mut admin| {
        let request = request.clone();
        async move { admin.describe(request).await }
    })?;
    Ok(answers.into_iter().map(|(_, answer)| answer).collect())
}

/// What the servers list, in the order in which it was sealed.
fn common_checkpoints(servers: &mut Servers, job: &str) -> anyhow::Result<Vec<Checkpoint>> {
    let request = v1::ListCheckpointsRequest { job: job.to_string() };
    let lists = servers.each(|mut admin| {
        let request = request.clone();
        async move { admin.list_checkpoints(request).await }
    })?;
    Ok(common(lists.into_iter().map(|(address, list)| (address, list.checkpoints)).collect()))
}
