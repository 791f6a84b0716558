//! `longshore scale`: other servers for a job, while its ranks train.

use std::{
    collections::BTreeSet,
    thread,
    time::{Duration, Instant, UNIX_EPOCH},
};

use anyhow::Context;
use longshore_proto::{Fault, FaultKind, Placement};
use longshore_wire::{Wire, v1};
use longshore_worker::session::whole;
use serde_json::json;

use crate::{access::JobArgs, output::Output, progress::Progress, servers::Servers};

/// Pause between two looks at the servers.
const LOOK: Duration = Duration::from_millis(250);
/// Time for a server to recover the job.
const RECOVERY: Duration = Duration::from_secs(60);

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    pub(super) target: JobArgs,
    /// All servers that the job shall have, as its ranks dial them
    #[arg(long, value_delimiter = ',', value_name = "HOST:PORT,...", conflicts_with_all = ["add", "remove"])]
    to: Vec<String>,
    /// Servers to add to those that the job has
    #[arg(long, value_delimiter = ',', value_name = "HOST:PORT,...")]
    add: Vec<String>,
    /// Servers that the job shall leave
    #[arg(long, value_delimiter = ',', value_name = "HOST:PORT,...")]
    remove: Vec<String>,
    /// Return once the job is on these servers alone, and not as soon as its servers know of the wish
    #[arg(long)]
    wait: bool,
    /// With --wait: seconds without a moved shard after which to give up waiting
    #[arg(long, default_value_t = 600, value_name = "SECONDS")]
    patience: u64,
}

/// A job's servers, as one of them says.
struct Seen {
    placement: Placement,
    answers: Vec<v1::DescribeResponse>,
}

impl Seen {
    fn members(&self) -> Vec<String> {
        let servers = &self.placement.servers;
        self.placement.members().map(|server| servers[server.0 as usize].clone()).collect()
    }

    /// Returns true once rank 0 has fulfilled a wish.
    fn has_reached(&self, asked_micros: u64) -> bool {
        self.scaling().any(|scaling| scaling.reached_micros >= asked_micros)
    }

    fn scaling(&self) -> impl Iterator<Item = &v1::Scaling> {
        self.answers.iter().filter_map(|answer| answer.scaling.as_ref())
    }

    fn moved(&self) -> u64 {
        self.scaling().map(|scaling| scaling.fetched_shards).sum()
    }

    fn obstacle(&self) -> Option<&str> {
        self.scaling().map(|scaling| &*scaling.failure).find(|failure| !failure.is_empty())
    }

    fn has_rank_0(&self) -> bool {
        self.answers.iter().flat_map(|answer| &answer.ranks).any(|rank| rank.rank == 0 && rank.watches)
    }
}

pub(super) fn run(args: &Args, out: Output) -> anyhow::Result<()> {
    let (servers, job) = args.target.connect()?;
    let begun = Instant::now();
    let asked_micros = UNIX_EPOCH.elapsed().map_or(1, |since| since.as_micros() as u64);
    let (seen, wanted) = loop {
        let seen = look(&servers, &job)?;
        let members = seen.members();
        let wanted = wanted(args, &members)?;
        // Every server of the job keeps the wish, also one that --servers does not name.
        let servers = Servers::connect(&members, &args.target.servers.access)?;
        let request = v1::ScaleRequest { job: job.clone(), servers: wanted.clone(), asked_micros };
        let told = servers.each(async |mut admin| admin.scale(request.clone()).await);
        let Err(refused) = told else { break (seen, wanted) };
        // A server that is leaving the job may have left it since the look.
        let fault = refused.downcast_ref::<Fault>();
        let has_left = fault.is_some_and(|fault| fault.kind == FaultKind::NotFound && fault.field == "job");
        if !has_left || begun.elapsed() > RECOVERY {
            return Err(refused);
        }
        thread::sleep(LOOK);
    };
    if !args.wait {
        let trained = seen.has_rank_0();
        out.result(
            || json!({"job": job, "servers": wanted, "trained": trained}),
            || match trained {
                true => format!("{job} moves to {}", wanted.join(", ")),
                false => format!("{job} moves to {} once its rank 0 trains", wanted.join(", ")),
            },
        );
        return Ok(());
    }
    wait(args, &job, (&wanted, asked_micros), out)
}

/// Returns the addresses that the job shall have.
fn wanted(args: &Args, members: &[String]) -> anyhow::Result<Vec<String>> {
    let mut wanted = if args.to.is_empty() { members.to_vec() } else { args.to.clone() };
    if let Some(unknown) = args.remove.iter().find(|server| !wanted.contains(server)) {
        let limit = format!("one of {}", members.join(", "));
        let fault = Fault::new(FaultKind::Invalid, "--remove", unknown, limit, "name it as the job does");
        return Err(crate::output::wrong_use(fault));
    }
    wanted.retain(|server| !args.remove.contains(server));
    wanted.extend(args.add.iter().filter(|server| !members.contains(server)).cloned());
    if args.to.is_empty() && args.add.is_empty() && args.remove.is_empty() {
        let limit = "--to, --add or --remove";
        let fault = Fault::new(FaultKind::Invalid, "--to", "absent", limit, "name the servers to train on");
        return Err(crate::output::wrong_use(fault));
    }
    Ok(wanted)
}

/// Waits until the job is on the wanted servers alone.
fn wait(args: &Args, job: &str, (wanted, asked_micros): (&[String], u64), out: Output) -> anyhow::Result<()> {
    let goal: BTreeSet<String> = wanted.iter().cloned().collect();
    let _waiting = Progress::waiting(&format!("moving {job} to {} servers", wanted.len()), out);
    let (begun, mut since, mut known) = (Instant::now(), Instant::now(), None);
    loop {
        let reachable: Vec<String> = [wanted, &args.target.servers.servers].concat();
        let (servers, _) = Servers::reach(&reachable, &args.target.servers.access)?;
        let seen = look(&servers, job)?;
        if seen.has_reached(asked_micros) && seen.members().into_iter().collect::<BTreeSet<_>>() == goal {
            let seconds = begun.elapsed().as_secs_f64();
            out.result(
                || json!({"job": job, "servers": wanted, "seconds": seconds}),
                || format!("{job} is on {} ({seconds:.1} s)", wanted.join(", ")),
            );
            return Ok(());
        }
        let now = (seen.moved(), seen.placement.epoch);
        if known.replace(now) != Some(now) {
            since = Instant::now();
        }
        if since.elapsed() > Duration::from_secs(args.patience) {
            let why = match seen.obstacle() {
                Some(obstacle) => obstacle.to_string(),
                None if !seen.has_rank_0() => "no process of rank 0 trains the job".into(),
                None => "see rank 0's log".into(),
            };
            let value = format!("{} of {} servers", seen.members().len(), wanted.len());
            let limit = format!("a shard moved within {} s", args.patience);
            let remedy = format!("{why}. The wish is kept: ask again with --wait, or for other servers");
            return Err(Fault::new(FaultKind::Deadline, "--to", value, limit, remedy).into());
        }
        thread::sleep(LOOK);
    }
}

/// Asks the servers that answer for the newest placement. Waits for those that recover the job, unless another knows.
fn look(servers: &Servers, job: &str) -> anyhow::Result<Seen> {
    let request = v1::DescribeRequest { job: job.to_string(), ..Default::default() };
    let begun = Instant::now();
    let mut found = loop {
        let answers = servers.answers(async |admin| whole(admin, request.clone()).await);
        let (found, refused): (Vec<_>, Vec<_>) = answers.into_iter().partition(|(_, answer)| answer.is_ok());
        let recovers = |(_, answer): &(String, Result<_, Fault>)| {
            answer.as_ref().is_err_and(|fault: &Fault| fault.kind == FaultKind::Unavailable)
        };
        if found.is_empty() && refused.iter().any(recovers) && begun.elapsed() < RECOVERY {
            thread::sleep(LOOK);
            continue;
        }
        if let (true, Some((address, Err(fault)))) = (found.is_empty(), refused.into_iter().next()) {
            return Err(fault).context(address);
        }
        break found.into_iter().filter_map(|(_, answer)| answer.ok()).collect::<Vec<_>>();
    };
    let newest = |answer: &&v1::DescribeResponse| {
        let version = answer.progress.as_ref().map_or(0, |progress| progress.version);
        (version, answer.placement.as_ref().map_or(0, |of| of.epoch))
    };
    let answer = found.iter().max_by_key(newest).context("no server was named")?;
    let placement = Placement::from_wire(answer.placement.clone())?;
    // Servers that have left the job say nothing of it any more.
    let is_member = |answer: &v1::DescribeResponse| placement.members().any(|of| of.0 == answer.server);
    found.retain(is_member);
    Ok(Seen { placement, answers: found })
}
