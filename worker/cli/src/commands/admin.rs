//! Commands that call every server of a job: checkpoint, resume, delete, drain.

use std::{
    cell::RefCell,
    hash::{BuildHasher, RandomState},
    thread,
    time::{Duration, Instant},
};

use anyhow::Context;
use longshore_proto::{Fault, FaultKind};
use longshore_wire::{Author, v1};
use longshore_worker::session::{
    Checkpoint, TRIES, asked_version, checkpoint_name, common, has_passed, is_busy, is_taken, numbered,
    paused_at,
};
use serde_json::json;

use crate::{
    access::{JobArgs, ServersArgs},
    output::Output,
    progress::Progress,
    servers::{Admin, PROMPTLY, Servers, Unanswered, brief, is_not_there},
};

/// Longest wait for other checkpoints on busy servers, and the pause between two tries.
const PATIENCE: Duration = Duration::from_secs(600);
const PAUSE: Duration = Duration::from_millis(250);

#[derive(clap::Args)]
pub(super) struct CheckpointArgs {
    #[command(flatten)]
    pub(super) target: JobArgs,
    /// The checkpoint's name [default: from the version]
    #[arg(long)]
    name: Option<String>,
}

#[derive(clap::Args)]
pub(super) struct DeleteArgs {
    #[command(flatten)]
    pub(super) servers: ServersArgs,
    /// The job: what is deleted must be named
    #[arg(long)]
    job: String,
    /// Also what a server keeps of it and cannot read, as when a drive is missing or damaged: it is lost for good then
    #[arg(long)]
    discard_unreadable: bool,
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

pub(super) fn checkpoint(args: &CheckpointArgs, out: Output) -> anyhow::Result<()> {
    let (servers, job) = args.target.connect_to_holders()?;
    let written = |answer: &v1::DescribeResponse| {
        (answer.checkpoint_bytes > 0).then_some((answer.checkpoint_written_bytes, answer.checkpoint_bytes))
    };
    let what = format!("writing a checkpoint of job {job}");
    let waiting = Progress::followed(&what, out, servers.follow(&job, written));
    let author = Author::Operator(RandomState::new().hash_one(std::process::id()));
    let (mut tried, mut taken, begun) = (0, 0, Instant::now());
    let (name, parts) = loop {
        let described = servers.described(&job)?;
        let version = asked_version(&described, tried);
        let free = || numbered(&checkpoint_name(version)).nth(taken);
        let Some(name) = args.name.clone().or_else(free) else {
            anyhow::bail!("every name for a checkpoint of version {version} is taken: choose one with --name")
        };
        let request =
            v1::CheckpointRequest { job: job.clone(), name: name.clone(), version, ..Default::default() };
        let parts = servers.each(async |mut admin| admin.checkpoint(author.sign(request.clone())).await);
        match parts {
            Err(error) if tried < TRIES && error.downcast_ref().is_some_and(has_passed) => tried += 1,
            // The servers are busy with other checkpoints now.
            Err(error) if error.downcast_ref().is_some_and(is_busy) && begun.elapsed() < PATIENCE => {
                discard(&servers, author, &job, &name);
                thread::sleep(PAUSE);
            }
            Err(error) if args.name.is_none() && error.downcast_ref().is_some_and(is_taken) => taken += 1,
            Err(error) => {
                discard(&servers, author, &job, &name);
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
    let sealed = servers.each(async |mut admin| admin.seal_checkpoint(author.sign(seal.clone())).await);
    let sealed = sealed.inspect_err(|_| discard(&servers, author, &job, &name))?;
    drop(waiting);
    let version = parts.first().map_or(0, |(_, answer)| answer.version);
    if out.is_json() {
        let manifest = |(address, answer): &(String, v1::SealCheckpointResponse)| json!({"server": address, "manifest": answer.manifest});
        let manifests: Vec<_> = sealed.iter().map(manifest).collect();
        say!("{}", json!({"job": job, "name": name, "version": version, "manifests": manifests}));
        return Ok(());
    }
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

/// Frees the room of written parts. If that fails, the next checkpoint frees the room.
fn discard(servers: &Servers, author: Author, job: &str, name: &str) {
    let request = v1::DiscardCheckpointRequest { job: job.to_string(), name: name.to_string() };
    let _ = servers.answers(async |mut admin| admin.discard_checkpoint(author.sign(request.clone())).await);
}

pub(super) fn checkpoints(target: &JobArgs, out: Output) -> anyhow::Result<()> {
    let (servers, job) = target.connect_to_holders()?;
    let request = v1::ListCheckpointsRequest { job: job.clone() };
    let lists = servers.each_promptly(async |mut admin| admin.list_checkpoints(request.clone()).await)?;
    let found = common(lists.into_iter().map(|(address, list)| (address, list.checkpoints)).collect());
    if found.is_empty() {
        // Checkpoints outlive their job, so a missing job is an error only without any checkpoint.
        servers.check_job(&job)?;
    }
    for Checkpoint { name, version, stale, damage, .. } in found {
        let version = version.0;
        out.result(
            || json!({"job": job, "name": name, "version": version, "stale": stale, "damage": damage}),
            || {
                let stale = if stale { "  stale: left behind when the job went back" } else { "" };
                let damage = damage.as_ref().map(|damage| format!("  DAMAGED {damage}")).unwrap_or_default();
                format!("{name}  version {version}{stale}{damage}")
            },
        );
    }
    Ok(())
}

pub(super) fn resume(args: &ResumeArgs, out: Output) -> anyhow::Result<()> {
    let (servers, job) = args.target.connect_to_holders()?;
    // The request names the version. A server that a first try has resumed then accepts the second try.
    let described = servers.described(&job)?;
    let version = paused_at(described.iter().filter_map(|answer| answer.progress.as_ref()));
    let request = v1::ResumeRequest { job: job.clone(), loss_scale: args.loss_scale.unwrap_or(0.0), version };
    servers.each(async |mut admin| admin.resume(request.clone()).await)?;
    out.result(|| json!({"job": job, "version": version, "resumed": true}), || "resumed".to_string());
    Ok(())
}

pub(super) fn step_back(args: &StepBackArgs, out: Output) -> anyhow::Result<()> {
    let (servers, job) = args.target.connect_to_holders()?;
    let answers = servers.answers_within(PROMPTLY, async |mut admin| admin.describe(brief(&job)).await);
    let (incarnation, decisions) = plan_step_back(answers, args.version)?;
    // The decisions are taken in a cycle, since a repeated call goes to all servers again.
    let decisions = RefCell::new(decisions.iter().cycle());
    servers.each(|mut admin: Admin| {
        let decided_by = decisions.borrow_mut().next().copied().unwrap_or_default();
        let request =
            v1::StepBackRequest { job: job.clone(), incarnation, version: args.version, decided_by };
        async move { admin.step_back(request).await }
    })?;
    let version = args.version;
    out.result(|| json!({"job": job, "version": version}), || format!("version {version}"));
    Ok(())
}

/// Checks that every server holds `version` or the one after it, before any server is changed. A server that cannot
/// read its newest version is not compared. Returns the incarnation that fences rank 0, and for each server the
/// incarnation that decided its newest version.
fn plan_step_back(
    described: Vec<(String, Result<v1::DescribeResponse, Fault>)>,
    version: u64,
) -> anyhow::Result<(u64, Vec<u64>)> {
    let (mut newest, mut decisions) = (0, Vec::new());
    for (address, answer) in described {
        let answer = match answer {
            Ok(answer) => answer,
            Err(fault) if fault.kind == FaultKind::Corrupt => {
                decisions.push(0);
                continue;
            }
            Err(fault) => return Err(fault).context(address),
        };
        let rank_zero = answer.ranks.iter().find(|rank| rank.rank == 0);
        newest = newest.max(rank_zero.map_or(0, |rank| rank.incarnation));
        let progress = answer.progress.unwrap_or_default();
        if ![version, version.saturating_add(1)].contains(&progress.version) {
            let limit = format!("{} or {}", progress.version.saturating_sub(1), progress.version);
            let remedy = "start rank 0, which brings the servers to one version; where it cannot, restore a checkpoint";
            return Err(Fault::new(FaultKind::Precondition, "--version", version, limit, remedy))
                .context(address);
        }
        decisions.push(progress.last_commit.map_or(0, |commit| commit.decided_by));
    }
    Ok((newest.saturating_add(1), decisions))
}

pub(super) fn delete(args: &DeleteArgs, out: Output) -> anyhow::Result<()> {
    let job = &args.job;
    let mut servers = args.servers.connect()?;
    let mut silent = servers.add_members(job, &args.servers.access)?;
    let there = servers.keep_left(job, &args.servers.servers);
    if there.is_some() {
        silent.clear();
    }
    let request = v1::DeleteJobRequest { job: job.clone(), discard_unreadable: args.discard_unreadable };
    // A server that cannot read its part refuses before any other part is deleted.
    let described = servers.answers_within(PROMPTLY, async |mut admin| admin.describe(brief(job)).await);
    let is_unread = |answer: &Result<_, Fault>| answer.as_ref().is_err_and(|fault| !is_not_there(fault));
    let unread = described.into_iter().filter(|(_, answer)| is_unread(answer));
    let unread: Vec<String> = unread.map(|(address, _)| address).collect();
    if !unread.is_empty() {
        let unread = Servers::connect(&unread, &args.servers.access)?;
        unread.each(async |mut admin| admin.delete_job(request.clone()).await)?;
    }
    let answers = servers.answers(async |mut admin| admin.delete_job(request.clone()).await);
    let any = !unread.is_empty() || answers.iter().any(|(_, answer)| answer.is_ok());
    for (address, answer) in answers {
        match answer {
            // An earlier call that did not reach every server deleted the job here.
            Err(fault) if any && is_not_there(&fault) => {}
            answer => answer.map(|_| ()).context(address)?,
        }
    }
    if !silent.is_empty() {
        let lead = format!("{job} is deleted, but for servers that may still have a part of it. ");
        return Err(Unanswered::new(&lead, &silent).into());
    }
    out.result(
        || match &there {
            Some(there) => json!({"job": job, "deleted": false, "servers": there}),
            None => json!({"job": job, "deleted": true}),
        },
        || match &there {
            Some(there) => format!(
                "deleted an old part of {job}, which is on {} now: name these to delete it",
                there.join(",")
            ),
            None => format!("deleted {job}"),
        },
    );
    Ok(())
}

pub(super) fn drain(args: &ServersArgs, out: Output) -> anyhow::Result<()> {
    let servers = args.connect()?;
    let waiting = Progress::followed("draining", out, || None);
    servers.each(async |mut admin| admin.drain(v1::DrainRequest {}).await)?;
    drop(waiting);
    out.result(|| json!({"servers": args.servers, "drained": true}), || "drained".to_string());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(version: u64) -> Result<v1::DescribeResponse, Fault> {
        let commit = v1::Commit { decided_by: 40 + version, ..Default::default() };
        let progress = v1::JobProgress { version, last_commit: Some(commit), ..Default::default() };
        let ranks = vec![v1::RankStatus { incarnation: 50 + version, ..Default::default() }];
        Ok(v1::DescribeResponse { progress: Some(progress), ranks, ..Default::default() })
    }

    fn plan(
        servers: [Result<v1::DescribeResponse, Fault>; 2],
        version: u64,
    ) -> anyhow::Result<(u64, Vec<u64>)> {
        plan_step_back(["a:1".to_string(), "b:1".to_string()].into_iter().zip(servers).collect(), version)
    }

    #[test]
    fn a_step_back_leads_to_one_version_or_to_nothing() {
        assert_eq!(plan([at(7), at(6)], 6).unwrap(), (58, vec![47, 46]));
        // Server b would lose the version that it stepped back from before.
        for version in [5, 7, 8] {
            assert!(plan([at(7), at(6)], version).is_err(), "{version}");
        }
        let unread = Fault::new(FaultKind::Corrupt, "state_dir", "damaged", "whole", "step back");
        assert_eq!(plan([Err(unread), at(6)], 6).unwrap(), (57, vec![0, 46]));
        let gone = Fault::new(FaultKind::Unavailable, "server", "silent", "answering", "look");
        assert!(plan([Err(gone), at(6)], 6).is_err());
    }
}
