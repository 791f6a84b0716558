//! `longshore restore`: fills a job from a checkpoint on all its servers, and opens it where it is not open.

use anyhow::Context;
use longshore_proto::{JobSpec, Rank};
use longshore_wire::{
    Wire,
    v1::{DescribeResponse, ListCheckpointsRequest, RestoreMode, RestoreRequest},
};
use longshore_worker::session::{GoBack, Options, Session};
use serde_json::json;

use crate::{access::JobArgs, output::Output, progress::Progress, servers::Servers};

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    pub(super) target: JobArgs,
    /// The checkpoint's name [default: the newest that can be restored]
    #[arg(long)]
    name: Option<String>,
    /// Delete the state that servers hold, and go back to the checkpoint
    #[arg(long)]
    discard_state: bool,
}

pub(super) fn run(args: &Args, out: Output) -> anyhow::Result<()> {
    let (servers, job) = args.target.connect()?;
    let spec = spec(&servers, &job, args.name.as_ref())?;
    let addresses = servers.list().iter().map(|server| server.address.clone()).collect();
    // The session connects as rank 0, whose view of the servers decides, and does not join.
    let options = Options { connections: 1, ..Options::new(addresses, spec, Rank(0)) };
    let session = Session::connect(args.target.servers.access.of(options))?;
    let how = GoBack { checkpoint: args.name.clone(), discard_state: args.discard_state };
    let waiting = Progress::followed(&format!("restoring job {job}"), out, servers.follow(&job, read));
    let restored = session.go_back(&how)?;
    drop(waiting);
    let (name, version) = (restored.name, restored.version.0);
    out.result(
        || json!({"job": job, "name": name, "version": version}),
        || format!("restored {name}: version {version}"),
    );
    Ok(())
}

/// Returns the shards that a server has read from the checkpoint, and their total. Shards stay counted until all
/// servers have loaded theirs.
fn read(answer: &DescribeResponse) -> Option<(u64, u64)> {
    let progress = answer.progress.as_ref()?;
    let loaded = u64::from(progress.restore.as_ref()?.shards);
    Some((loaded, loaded + progress.missing_shards.len() as u64))
}

fn spec(servers: &Servers, job: &str, name: Option<&String>) -> anyhow::Result<JobSpec> {
    let names = match name {
        Some(name) => vec![name.clone()],
        None => names(servers, job)?,
    };
    let mut refusal = None;
    for name in names.iter().rev() {
        let request = RestoreRequest {
            job: job.to_string(),
            name: name.clone(),
            mode: RestoreMode::Check.into(),
            deadline_ms: 0,
        };
        let answers = servers.answers(async |mut admin| admin.restore(request.clone()).await);
        let (mut found, mut refused) = (Vec::new(), None);
        for (address, answer) in answers {
            match answer {
                Ok(answer) => found.push(answer),
                Err(fault) => refused = refused.or(Some((address, fault))),
            }
        }
        // The open job's spec comes first: the checkpoint may have another tier or world size.
        let open = found.iter().position(|answer| answer.progress.is_some());
        if let Some(answer) = found.into_iter().nth(open.unwrap_or(0)) {
            return Ok(JobSpec::from_wire(answer.spec)?);
        }
        refusal = refusal.or(refused);
    }
    let (address, fault) = refusal.with_context(|| {
        format!("there is no checkpoint of job {job}: look with `longshore checkpoints --job={job}`")
    })?;
    Err(anyhow::Error::from(fault).context(address))
}

/// Returns the names of the checkpoints that any server lists, oldest first.
fn names(servers: &Servers, job: &str) -> anyhow::Result<Vec<String>> {
    let request = ListCheckpointsRequest { job: job.to_string() };
    let lists = servers.each(async |mut admin| admin.list_checkpoints(request.clone()).await)?;
    let mut all: Vec<_> = lists.into_iter().flat_map(|(_, list)| list.checkpoints).collect();
    all.sort_by_key(|checkpoint| checkpoint.version);
    Ok(all.into_iter().map(|checkpoint| checkpoint.name).collect())
}
