//! `longshore scale`: other servers for jobs, while their ranks train or after these have ended.

mod plan;

use std::{
    collections::BTreeSet,
    panic::resume_unwind,
    thread,
    time::{Duration, Instant},
};

use anyhow::Context;
use longshore_proto::{Fault, FaultKind, JobSpec, Placement, Rank, ServerId, TierKind, check_max_exposed};
use longshore_wire::{Wire, v1};
use longshore_worker::{
    Error, Options, Session,
    pipeline::move_idle,
    session::{asked_after, is_loading},
};
use serde_json::json;

use self::plan::Plan;
use crate::{
    access::JobArgs,
    output::{Output, wrong_use},
    progress::Progress,
    servers::{PROMPTLY, Servers, Unanswered, is_not_there, jobs_of},
};

/// Pause between two looks at the servers.
const LOOK: Duration = Duration::from_millis(250);
/// Time without any rank after which the command moves a job itself. Launchers start ranks again sooner, and ranks reconnect
/// sooner with a restarted server.
const IDLE: Duration = Duration::from_secs(10);
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
    /// Servers that the job shall leave; without --job, every job on them
    #[arg(long, value_delimiter = ',', value_name = "HOST:PORT,...")]
    remove: Vec<String>,
    /// Servers that are gone for good, whose shards have replicas: they are waited for no more, and training goes on without
    /// a lost step
    #[arg(long, value_delimiter = ',', value_name = "HOST:PORT,...")]
    lost: Vec<String>,
    /// Tier in which new servers keep the job; no server of another tier may stay [default: the job's]
    #[arg(long, value_name = "TIER")]
    tier: Option<TierKind>,
    /// Largest part of a step that updates may wait for shards that move, above 0 and at most 100 percent
    #[arg(long, default_value = "5%", value_name = "PERCENT", value_parser = parse_percent)]
    max_exposed: f64,
    /// Say what would move and whether it fits in the servers' memory, and move nothing
    #[arg(long, conflicts_with = "wait")]
    dry_run: bool,
    /// Return once the job is on these servers alone, and not as soon as its servers know of the wish
    #[arg(long)]
    wait: bool,
    /// With --wait: seconds without a moved shard after which to give up waiting
    #[arg(long, default_value_t = 600, value_name = "SECONDS")]
    patience: u64,
}

/// Parses `5%` or `5` into a part of a step.
fn parse_percent(text: &str) -> Result<f64, Fault> {
    let part = text.strip_suffix('%').unwrap_or(text).parse::<f64>().map(|percent| percent / 100.0);
    part.ok().filter(|&part| check_max_exposed(part).is_ok()).ok_or_else(|| {
        let limit = "above 0 % and at most 100 %";
        let value = text.to_string();
        Fault::invalid("--max-exposed", value, limit, "name a part of a step, as in 5%")
    })
}

/// A job's servers and their answers. Spec and placement come from the server with the most progress.
struct Seen {
    spec: JobSpec,
    placement: Placement,
    answers: Vec<v1::DescribeResponse>,
}

impl Seen {
    fn members(&self) -> Vec<String> {
        let servers = &self.placement.servers;
        self.placement.members().map(|server| servers[server.0 as usize].clone()).collect()
    }

    /// Numbers of the servers among `addresses` that the job has.
    fn numbers_of(&self, addresses: &[String]) -> Vec<u32> {
        let servers = &self.placement.servers;
        let is_named = |server: &ServerId| addresses.contains(&servers[server.0 as usize]);
        self.placement.members().filter(is_named).map(|server| server.0).collect()
    }

    fn scaling(&self) -> impl Iterator<Item = &v1::Scaling> {
        self.answers.iter().filter_map(|answer| answer.scaling.as_ref())
    }

    /// Shards and bytes that servers have fetched since the job was opened on them.
    fn fetched(&self) -> (u64, u64) {
        let add = |(shards, bytes), of: &v1::Scaling| (shards + of.fetched_shards, bytes + of.fetched_bytes);
        self.scaling().fold((0, 0), add)
    }

    /// Returns why nothing moves. None while nothing is in the way.
    fn obstacle(&self) -> Option<&str> {
        let failures = self.scaling().map(|scaling| &*scaling.failure);
        let without_rank_0 = (!self.has_rank_0()).then_some("no process of rank 0 trains the job, and other ranks wait for it: start it, or end them and ask again");
        failures.chain(without_rank_0).find(|obstacle| !obstacle.is_empty())
    }

    fn has_rank_0(&self) -> bool {
        self.answers.iter().flat_map(|answer| &answer.ranks).any(|rank| rank.rank == 0 && rank.watches)
    }

    /// Returns true if no rank is connected with any server, and no server is given up. Ranks move the shards of a lost
    /// server.
    fn is_quiet(&self) -> bool {
        !self.has_lost() && !self.answers.iter().any(is_loading) && self.ranks_there().next().is_none()
    }

    fn has_lost(&self) -> bool {
        self.scaling().any(|scaling| !scaling.lost.is_empty())
    }

    fn ranks_there(&self) -> impl Iterator<Item = &v1::RankStatus> {
        let ranks = self.answers.iter().flat_map(|answer| &answer.ranks);
        ranks.filter(|rank| rank.watches || !rank.left && !rank.transport.is_empty())
    }

    /// Returns true if ranks go on with a wish. Another operator's command takes rank 0 too, but watches nothing, so it
    /// does not count.
    fn is_of_ranks(&self) -> bool {
        self.has_lost()
            || self.answers.iter().all(is_loading)
            || self.ranks_there().any(|rank| rank.rank != 0 || rank.watches)
    }

    /// Returns true if another operator's command may be moving the job without ranks.
    fn is_moved_by_command(&self) -> bool {
        !self.is_of_ranks() && self.scaling().any(|scaling| scaling.reached_micros < scaling.asked_micros)
    }

    /// Returns the refusal of a wish that a later one has replaced. None for the newest wish.
    fn replaced(&self, flag: &str, asked_micros: u64) -> Option<Fault> {
        let later = self.scaling().find(|scaling| scaling.asked_micros > asked_micros)?;
        let value = format!("replaced by a later wish for {}", later.wanted.join(","));
        let remedy = "ask again where these servers are wanted after all";
        Some(Fault::new(FaultKind::Conflict, flag, value, "the newest wish", remedy))
    }

    /// Returns true if no rank has been connected for some time, as each server of the job says.
    fn is_idle(&self) -> bool {
        let is_long = |answer: &v1::DescribeResponse| u128::from(answer.idle_ms) >= IDLE.as_millis();
        let all_answer = self.answers.len() == self.placement.members().count();
        self.is_quiet() && all_answer && self.answers.iter().all(is_long)
    }
}

/// The servers that an operator wants a job to have.
struct Wish {
    job: String,
    servers: Vec<String>,
    asked_micros: u64,
    request: v1::ScaleRequest,
    plan: Plan,
    /// The job's state when its servers received the scale request.
    before: Seen,
}

impl Wish {
    fn say_done(&self, begun: Instant, out: Output) {
        let Wish { job, servers, .. } = self;
        let seconds = begun.elapsed().as_secs_f64();
        out.result(
            || json!({"job": job, "servers": servers, "seconds": seconds}),
            || format!("{job} is on {} ({seconds:.1} s)", servers.join(", ")),
        );
    }
}

pub(super) fn run(args: &Args, out: Output) -> anyhow::Result<()> {
    if [&args.to, &args.add, &args.remove, &args.lost].iter().all(|servers| servers.is_empty()) {
        let limit = "--to, --add, --remove or --lost";
        let fault = Fault::new(FaultKind::Invalid, "--to", "absent", limit, "name the servers to train on");
        return Err(wrong_use(fault));
    }
    if args.target.job.is_none() && !args.remove.is_empty() {
        return clear(args, out);
    }
    let (servers, job) = args.target.connect()?;
    let wish = args.wish(&servers, job, |members| args.wanted(members))?;
    args.say(&wish, out)?;
    args.fulfil(&wish, out)
}

/// Moves every job off the servers of `--remove`.
fn clear(args: &Args, out: Output) -> anyhow::Result<()> {
    let servers = Servers::connect(&args.remove, &args.target.servers.access)?;
    let lists =
        servers.each_promptly(async |mut admin| admin.list_jobs(v1::ListJobsRequest::default()).await)?;
    let (mut wishes, mut kept) = (Vec::new(), 0);
    let jobs = jobs_of(&lists);
    for job in &jobs {
        let outcome = match left_by(&servers, job) {
            Ok(left) if left.is_empty() => continue,
            Ok(left) => args.wish(&servers, job.clone(), |members| args.without(job, members, &left)),
            Err(error) => Err(error),
        };
        match outcome.and_then(|wish| args.say(&wish, out).map(|()| wish)) {
            Ok(wish) => wishes.push(wish),
            Err(error) => {
                kept += 1;
                let why = format!("{error:#}");
                out.result(|| json!({"job": job, "stays": why}), || format!("{job} stays: {why}"));
            }
        }
    }
    for wish in &wishes {
        args.fulfil(wish, out)?;
    }
    if kept > 0 {
        let value = format!("{}, which {kept} of {} jobs need", args.remove.join(","), jobs.len());
        let (limit, remedy) = ("servers that no job needs", "do for each job that stays what its line says");
        return Err(Fault::new(FaultKind::Precondition, "--remove", value, limit, remedy).into());
    }
    let removed = args.remove.join(", ");
    if wishes.is_empty() {
        out.result(|| json!({"servers": args.remove, "jobs": 0}), || format!("no job is on {removed}"));
    }
    Ok(())
}

/// Returns the addresses of the given servers that the job is on, as the job names them.
fn left_by(servers: &Servers, job: &str) -> anyhow::Result<BTreeSet<String>> {
    let mut left = BTreeSet::new();
    for (address, answer) in servers.wholes(job) {
        match answer {
            Ok(answer) => {
                let placement = Placement::from_wire(answer.placement)?;
                let named = placement.servers.get(answer.server as usize).cloned();
                left.extend(named.filter(|name| !name.is_empty()));
            }
            Err(fault) if is_not_there(&fault) => {}
            Err(fault) => return Err(fault).context(address),
        }
    }
    Ok(left)
}

impl Args {
    /// Tells a job's servers of the wish, unless this is a dry run.
    fn wish(
        &self,
        servers: &Servers,
        job: String,
        wanted: impl Fn(&[String]) -> anyhow::Result<Vec<String>>,
    ) -> anyhow::Result<Wish> {
        let access = &self.target.servers.access;
        let begun = Instant::now();
        loop {
            let mut seen = look(servers, &job)?;
            if seen.answers.is_empty() {
                seen = look(&Servers::reach(&seen.members(), access)?.0, &job)?;
            }
            let members = seen.members();
            let mut wanted = wanted(&members)?;
            // Every server of the job keeps the wish, also one that --servers does not name.
            let servers = &seen.placement.servers;
            let known_lost = seen.scaling().flat_map(|scaling| &scaling.lost);
            let known_lost = known_lost.filter_map(|&server| servers.get(server as usize));
            let lost: BTreeSet<&String> = self.lost.iter().chain(known_lost).collect();
            // A server that was given up before is a member until the next decision. Only naming the server again takes
            // the loss back.
            let is_named = |server: &String| self.to.contains(server) || self.add.contains(server);
            wanted.retain(|server| !lost.contains(server) || is_named(server));
            let living: Vec<String> =
                members.iter().filter(|member| !lost.contains(member)).cloned().collect();
            let members = Servers::connect(&living, access)?;
            // A server that --servers does not name has ranks and a tier too.
            seen = look(&members, &job)?;
            let asked_micros = asked_after(seen.scaling());
            let request = v1::ScaleRequest {
                job: job.clone(),
                servers: wanted.clone(),
                asked_micros,
                check: true,
                lost: seen.numbers_of(&self.lost),
                max_exposed: self.max_exposed,
                tier: self.tier.map_or(0, TierKind::number),
            };
            let checked = Plan::make(&members, &seen, &request, access);
            let request = v1::ScaleRequest { check: false, ..request };
            let planned = checked.and_then(|plan| {
                if !self.dry_run {
                    plan.check_fits()?;
                    members.each(async |mut admin| admin.scale(request.clone()).await)?;
                    // A server that is named as lost and still runs is told too: ranks may listen to it alone.
                    if let Ok((lost, _)) = Servers::reach(&self.lost, access) {
                        lost.answers_within(PROMPTLY, async |mut admin| admin.scale(request.clone()).await);
                    }
                }
                Ok(plan)
            });
            let refused = match planned {
                Ok(plan) => {
                    return Ok(Wish { job, servers: wanted, asked_micros, request, plan, before: seen });
                }
                Err(refused) => refused,
            };
            // A server may have left the job since the look, and then refuses the wish.
            let has_left = refused.downcast_ref::<Fault>().is_some_and(is_not_there);
            if !has_left || begun.elapsed() > RECOVERY {
                return Err(refused);
            }
            thread::sleep(LOOK);
        }
    }

    /// Returns the addresses that the job shall have.
    fn wanted(&self, members: &[String]) -> anyhow::Result<Vec<String>> {
        let mut wanted = if self.to.is_empty() { members.to_vec() } else { self.to.clone() };
        for (flag, named) in [("--remove", &self.remove), ("--lost", &self.lost)] {
            if let Some(unknown) = named.iter().find(|server| !members.contains(server)) {
                let limit = format!("one of {}", members.join(", "));
                let fault = Fault::new(FaultKind::Invalid, flag, unknown, limit, "name it as the job does");
                return Err(wrong_use(fault));
            }
            wanted.retain(|server| !named.contains(server));
        }
        wanted.extend(self.add.iter().filter(|server| !members.contains(server)).cloned());
        Ok(wanted)
    }

    /// Returns the addresses that a job shall have once it has left some of its servers.
    fn without(&self, job: &str, members: &[String], left: &BTreeSet<String>) -> anyhow::Result<Vec<String>> {
        let stays = members.iter().filter(|member| !left.contains(*member));
        let rest: Vec<String> =
            stays.chain(self.add.iter().filter(|server| !members.contains(server))).cloned().collect();
        if !rest.is_empty() {
            return Ok(rest);
        }
        let remedy = format!("name other servers: `longshore scale --job={job} --to HOST:PORT,...`");
        let (value, limit) = (members.join(","), "not all servers of a job");
        Err(Fault::new(FaultKind::Precondition, "--remove", value, limit, remedy).into())
    }

    /// Prints what would move, in a dry run.
    fn say(&self, wish: &Wish, out: Output) -> anyhow::Result<()> {
        let Wish { job, servers, plan, .. } = wish;
        if self.dry_run {
            out.result(|| plan.object(job, servers), || plan.text(job));
            plan.check_fits()?;
        }
        Ok(())
    }

    /// Moves a job without ranks, and reports or awaits the moves of any other job. Shards of a lost server are moved
    /// by the ranks' steps.
    fn fulfil(&self, wish: &Wish, out: Output) -> anyhow::Result<()> {
        if self.dry_run {
            return Ok(());
        }
        let before = &wish.before;
        let is_quiet = self.lost.is_empty() && (before.is_quiet() || before.is_moved_by_command());
        if is_quiet && self.move_quiet(wish, out)? {
            return Ok(());
        }
        if self.wait {
            return self.wait(wish, out);
        }
        let Wish { job, servers, plan, before, .. } = wish;
        let trained = before.has_rank_0();
        let until = if trained { "" } else { " once its rank 0 trains" };
        out.result(
            || json!({"job": job, "servers": servers, "trained": trained}),
            || format!("{job} moves to {}{until}: {}", servers.join(", "), plan.amount()),
        );
        Ok(())
    }

    /// Moves a job once no rank has been connected for [`IDLE`]. Returns false if ranks go on with the wish.
    ///
    /// # Errors
    /// `Conflict` once a later wish has replaced this one.
    fn move_quiet(&self, wish: &Wish, out: Output) -> anyhow::Result<bool> {
        let access = &self.target.servers.access;
        let (begun, seconds) = (Instant::now(), IDLE.as_secs());
        let mut waiting = Some(Progress::waiting(&format!("{}: {seconds} s without ranks", wish.job), out));
        let mut members: BTreeSet<String> = wish.before.members().into_iter().collect();
        // An earlier wish may be under way, to servers that do not know of this wish.
        let mut known = members.clone();
        known.extend(wish.before.scaling().flat_map(|scaling| scaling.wanted.clone()));
        let all = |known: &BTreeSet<String>| known.iter().cloned().collect::<Vec<_>>();
        let (mut servers, mut silent) = Servers::reach(&all(&known), access)?;
        silent.retain(|(address, _)| members.contains(address));
        if !silent.is_empty() {
            return Err(Unanswered::new("", &silent).into());
        }
        loop {
            let seen = look(&servers, &wish.job)?;
            if let Some(replaced) = seen.replaced("--to", wish.asked_micros) {
                return Err(replaced.into());
            }
            if seen.is_of_ranks() || begun.elapsed() > Duration::from_secs(self.patience) {
                return Ok(false);
            }
            let now: BTreeSet<String> = seen.members().into_iter().collect();
            if now != members {
                let joined = Servers::connect(&all(&now), access)?;
                joined.each(async |mut admin| admin.scale(wish.request.clone()).await)?;
                known.extend(now.iter().cloned());
                (members, servers) = (now, Servers::reach(&all(&known), access)?.0);
            } else if seen.is_idle() {
                drop(waiting.take());
                if self.settle_idle(wish, &seen, out)? {
                    return Ok(true);
                }
            }
            thread::sleep(LOOK);
        }
    }

    /// Moves a job that makes no steps, and reports the move. Returns false if a rank 0 or another command has taken
    /// over.
    fn settle_idle(&self, wish: &Wish, seen: &Seen, out: Output) -> anyhow::Result<bool> {
        let begun = Instant::now();
        let moved = self.move_idle(wish, seen, out);
        let reachable: Vec<String> = wish.servers.iter().chain(&seen.members()).cloned().collect();
        let now = Servers::reach(&reachable, &self.target.servers.access);
        let now = now.and_then(|(servers, _)| look(&servers, &wish.job));
        if let Some(replaced) = now.ok().and_then(|now| now.replaced("--to", wish.asked_micros)) {
            return Err(replaced.into());
        }
        match moved {
            Err(Error::Fenced(_)) => Ok(false),
            Err(Error::Call(failed)) if failed.fault.kind == FaultKind::Fenced => Ok(false),
            moved => {
                moved?;
                wish.say_done(begun, out);
                Ok(true)
            }
        }
    }

    /// Moves a job that makes no steps, from the servers on which it was `seen`.
    fn move_idle(&self, wish: &Wish, seen: &Seen, out: Output) -> longshore_worker::Result<()> {
        let Wish { job, servers: wanted, asked_micros, plan, .. } = wish;
        let access = &self.target.servers.access;
        let options = Options { connections: 1, ..Options::new(seen.members(), seen.spec.clone(), Rank(0)) };
        let session = Session::connect(access.of(options))?;
        let at_first = seen.fetched();
        let bar = Progress::bytes(job, plan.bytes.max(1), out);
        let reachable: Vec<String> = wanted.iter().chain(&seen.members()).cloned().collect();
        thread::scope(|scope| {
            let moving = scope.spawn(|| move_idle(&session, wanted, self.tier, *asked_micros));
            while !moving.is_finished() {
                let seen = Servers::reach(&reachable, access).and_then(|(servers, _)| look(&servers, job));
                if let Ok(seen) = seen {
                    let (shards, bytes) = plan.moved(at_first, seen.fetched());
                    bar.at(bytes, format!("{job}: {shards} of {} shards", plan.shards));
                }
                thread::sleep(LOOK);
            }
            moving.join().unwrap_or_else(|panic| resume_unwind(panic))
        })
    }

    /// Waits until the job is on the wanted servers alone.
    fn wait(&self, wish: &Wish, out: Output) -> anyhow::Result<()> {
        let Wish { job, servers: wanted, asked_micros, plan, before, .. } = wish;
        let goal: BTreeSet<String> = wanted.iter().cloned().collect();
        let bar = match plan.bytes {
            0 => Progress::waiting(job, out),
            bytes => Progress::bytes(job, bytes, out),
        };
        let reachable: Vec<String> =
            goal.iter().cloned().chain(before.members()).collect::<BTreeSet<_>>().into_iter().collect();
        let at_first = before.fetched();
        let (begun, mut since, mut known) = (Instant::now(), Instant::now(), None);
        loop {
            let (servers, silent) = Servers::reach(&reachable, &self.target.servers.access)?;
            // No server can be reached now: the link may be cut for a while.
            if servers.list().is_empty() {
                if since.elapsed() > Duration::from_secs(self.patience) {
                    return Err(Unanswered::new("", &silent).into());
                }
                thread::sleep(LOOK);
                continue;
            }
            let seen = look(&servers, job)?;
            let is_there = seen.members().into_iter().collect::<BTreeSet<_>>() == goal;
            if is_there && seen.scaling().any(|scaling| scaling.reached_micros >= *asked_micros) {
                drop(bar);
                wish.say_done(begun, out);
                return Ok(());
            }
            if let Some(replaced) = seen.replaced("--wait", *asked_micros) {
                return Err(replaced.into());
            }
            if seen.is_idle() && self.settle_idle(wish, &seen, out)? {
                return Ok(());
            }
            let fetched = seen.fetched();
            let now = (fetched, seen.placement.epoch);
            if known.replace(now) != Some(now) {
                since = Instant::now();
            }
            let (shards, bytes) = plan.moved(at_first, fetched);
            let ending = (shards == plan.shards).then_some("ending");
            let why = seen.obstacle().or(ending).map(|why| format!(" ({why})")).unwrap_or_default();
            bar.at(bytes, format!("{job}: {shards} of {} shards{why}", plan.shards));
            if since.elapsed() > Duration::from_secs(self.patience) {
                let why = seen.obstacle().unwrap_or("see rank 0's log");
                let value = format!("{} of {} servers", seen.members().len(), wanted.len());
                let limit = format!("a shard moved within {} s", self.patience);
                let remedy = format!("{why}. The wish is kept: ask again with --wait, or for other servers");
                return Err(Fault::new(FaultKind::Deadline, "--to", value, limit, remedy).into());
            }
            thread::sleep(LOOK);
        }
    }
}

/// Asks the servers that answer for the newest placement. If no server answers with the placement, waits for servers
/// that recover the job.
fn look(servers: &Servers, job: &str) -> anyhow::Result<Seen> {
    let begun = Instant::now();
    let mut found = loop {
        let (found, refused): (Vec<_>, Vec<_>) =
            servers.wholes(job).into_iter().partition(|(_, answer)| answer.is_ok());
        let recovers = |(_, answer): &(String, Result<_, Fault>)| {
            let passes = [FaultKind::Unavailable, FaultKind::Deadline];
            answer.as_ref().is_err_and(|fault: &Fault| passes.contains(&fault.kind))
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
    let spec = JobSpec::from_wire(answer.spec.clone())?;
    let placement = Placement::from_wire(answer.placement.clone())?;
    // Answers of servers that have left the job, or are only prepared for it, do not count.
    let is_member = |answer: &v1::DescribeResponse| placement.members().any(|of| of.0 == answer.server);
    found.retain(is_member);
    Ok(Seen { spec, placement, answers: found })
}

#[cfg(test)]
mod tests {
    use super::parse_percent;

    #[test]
    fn a_part_of_a_step_is_a_percentage() {
        for (text, part) in [("5%", 0.05), ("5", 0.05), ("0.5%", 0.005), ("100", 1.0)] {
            assert_eq!(parse_percent(text), Ok(part));
        }
        for text in ["", "%", "0", "-1", "101%", "5%%", "nan", "inf", "five"] {
            let refused = parse_percent(text).unwrap_err();
            assert_eq!((&*refused.field, &*refused.value), ("--max-exposed", text));
        }
    }
}
