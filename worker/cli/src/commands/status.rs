//! `longshore status`: jobs on servers, their progress, and their waits.

mod gather;
mod object;
mod steps;

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use longshore_proto::{legible, remedies};
use longshore_wire::v1;

use self::{
    gather::{Answers, Found, GONE, Wear, combined_hash, formats, hashed, last_commit, phase},
    object::object,
};
use crate::{
    access::ServersArgs,
    output::{Output, wrong_use},
    servers::{PROMPTLY, Silent, Unanswered, standing},
    sizes::human,
};

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    pub(super) servers: ServersArgs,
    /// Only this job
    #[arg(long)]
    job: Option<String>,
    /// Leave the state hash out: it reads all of the state
    #[arg(long)]
    no_hash: bool,
    /// With --output json: tell the last N decided steps of each server too, with loss, times and speeds. Servers keep 512
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true, value_parser = clap::value_parser!(u32).range(0..=512))]
    steps: u32,
    /// Longest wait, in seconds, for a server to say what it holds
    #[arg(long, default_value_t = PROMPTLY.as_secs(), value_parser = clap::value_parser!(u64).range(1..=3600))]
    deadline_s: u64,
}

pub(super) fn run(args: &Args, out: Output) -> anyhow::Result<()> {
    if args.steps > 0 && !out.is_json() {
        return Err(wrong_use(anyhow::anyhow!(
            "--steps is for programs: add --output json, or watch steps with longshore top"
        )));
    }
    let found = Found::ask(&args.servers, Duration::from_secs(args.deadline_s))?;
    if !out.is_json() {
        for (address, list) in &found.lists {
            let (reserved, budget) = (human(list.memory_reserved), human(list.memory_budget));
            let role = if list.is_witness { ", a witness" } else { "" };
            line(&format!("{address}  {reserved} of {budget} reserved{role}"));
            list.identities.iter().for_each(|identity| line(&format!("  {}", share_of(identity))));
        }
        found.silent.iter().for_each(|(address, why)| line(&format!("{address}  {why}")));
    }
    let jobs = found.jobs(args.job.as_deref())?;
    for job in &jobs {
        let (mut answers, without) = found.describe(job, args.steps > 0);
        let unhashed =
            if args.no_hash { Some(LEFT_OUT.to_string()) } else { hashed(&found, job, &mut answers) };
        if out.is_json() {
            say!("{}", object(job, &answers, &without, args.steps as usize));
        } else {
            print(job, &answers, &without, unhashed);
        }
    }
    if jobs.is_empty() && !out.is_json() {
        say!("no jobs");
    }
    let asked = found.lists.len() + found.silent.len();
    if !found.silent.is_empty() {
        let lead = format!("{} of {asked} servers did not answer: ", found.silent.len());
        return Err(Unanswered::new(&lead, &found.silent).into());
    }
    Ok(())
}

/// A job that was used within this time is not called idle.
const WORTH_A_WORD: Duration = Duration::from_secs(600);
const LEFT_OUT: &str = "left out, as --no-hash says";

/// Prints one line. Line breaks in a server's text cannot begin another line.
fn line(text: &str) {
    say!("{}", legible(text));
}

fn print(job: &str, answers: &Answers, without: &Silent, unhashed: Option<String>) {
    say!("");
    line(&format!("job {job}"));
    let first = answers.first().map(|(_, first)| first);
    let spec = first.and_then(|first| first.spec.as_ref());
    if let (Some(first), Some(spec)) = (first, spec) {
        let formats = formats(first).map_or_else(
            || "formats of a newer version".to_string(),
            |formats| format!("master weights {}, state {}", formats.master, formats.state),
        );
        line(&format!(
            "  {} parameters in {} tensors, {} ranks, {} micro-steps, {formats}",
            first.parameters,
            first.tensors,
            first.progress.as_ref().map_or(0, |progress| progress.world_size),
            spec.micro_steps
        ));
    }
    for (address, answer) in answers {
        let Some(progress) = &answer.progress else { continue };
        line(&format!(
            "  {address}  {}  version {} ({} applied)  {}  pushed {}  pulled {}  {} x {}",
            phase(answer),
            progress.version,
            progress.applied,
            human(answer.memory_bytes),
            human(answer.pushed_bytes),
            human(answer.pulled_bytes),
            answer.threads,
            answer.isa
        ));
        let more = [
            idle(answer),
            (answer.disk_bytes > 0).then(|| drives(answer)),
            answer.checkpoints.as_ref().map(last_checkpoint),
            answer.scaling.as_ref().and_then(moving),
            held_up(progress, &answer.waiting_for),
        ];
        more.into_iter().flatten().for_each(|text| line(&format!("    {text}")));
    }
    for (address, reason) in without {
        line(&format!("  {address}  {reason}"));
    }
    if let Some(commit) = last_commit(answers) {
        line(&format!("  {}", decision(commit, spec)));
    }
    for rank in first.iter().flat_map(|first| &first.ranks) {
        // A server counts gradients from the rank's last join on.
        let step = match rank.last_step {
            0 => "no gradient yet".to_string(),
            step => format!("last step {step}"),
        };
        line(&format!("  rank {}  {}  {}  {step}", rank.rank, standing(rank), rank.transport));
    }
    line(&match combined_hash(answers) {
        Some((version, hash)) => format!("  state hash {hash} at version {version}"),
        None => format!("  state hash: {}", unhashed.unwrap_or_else(|| no_hash(answers, without))),
    });
}

fn share_of(identity: &v1::IdentityUsage) -> String {
    let of = |has: String, most: Option<String>| match most {
        Some(most) => format!("{has} of {most}"),
        None => has,
    };
    let bytes = |has: u64, most: Option<u64>| of(human(has), most.map(human));
    let count = |has: u64, most: Option<u64>| of(has.to_string(), most.map(|most| most.to_string()));
    let v1::IdentityUsage { name, jobs, memory_bytes, drive_bytes, connections, .. } = identity;
    format!(
        "identity {name}: {} jobs, {} of memory, {} of drives, {} connections",
        count(*jobs, identity.most_jobs),
        bytes(*memory_bytes, identity.most_memory_bytes),
        bytes(*drive_bytes, identity.most_drive_bytes),
        count(*connections, identity.most_connections)
    )
}

/// Returns a server's part in a change of the job's servers. None once the change is over.
fn moving(scaling: &v1::Scaling) -> Option<String> {
    let v1::Scaling { wanted, asked_micros, awaited_shards, failure, reached_micros, .. } = scaling;
    let (fetched, bare) = (human(scaling.fetched_bytes), scaling.unreplicated_shards);
    if *awaited_shards == 0 && reached_micros >= asked_micros && bare == 0 {
        return None;
    }
    let awaited = (*awaited_shards > 0).then(|| format!("fetches {awaited_shards} shards, {fetched} so far"));
    let wish = (reached_micros < asked_micros).then(|| format!("the job moves to {}", wanted.join(", ")));
    let bare = (bare > 0).then(|| format!("{bare} shards lack a replica"));
    let failure = (!failure.is_empty()).then(|| failure.clone());
    let said: Vec<String> = awaited.into_iter().chain(wish).chain(bare).chain(failure).collect();
    Some(said.join("; "))
}

/// Returns the job's owner and idle time. None if neither is worth a line.
fn idle(answer: &v1::DescribeResponse) -> Option<String> {
    let owner = (!answer.owner.is_empty()).then(|| format!("of {}", answer.owner));
    let idle = Duration::from_millis(answer.idle_ms);
    let unused = (idle > WORTH_A_WORD).then(|| format!("unused for {}", time(idle)));
    let said: Vec<String> = owner.into_iter().chain(unused).collect();
    (!said.is_empty()).then(|| said.join(", "))
}

/// Returns why no step is decided: a pause with its remedy, or a wait. None if nothing is in the way.
fn held_up(progress: &v1::JobProgress, waiting_for: &str) -> Option<String> {
    let reason = &progress.pause_reason;
    if reason.is_empty() {
        return (!waiting_for.is_empty()).then(|| format!("waits for {waiting_for}"));
    }
    Some(match remedies::of_pause(reason) {
        "" => format!("paused: {reason}"),
        remedy => format!("paused: {reason}. {remedy}"),
    })
}

/// Returns why the servers' answers make no hash of the whole state.
fn no_hash(answers: &Answers, without: &Silent) -> String {
    let progress = || answers.iter().filter_map(|(_, answer)| answer.progress.as_ref());
    let versions: Vec<String> =
        answers.iter().map(|(address, answer)| format!("{} on {address}", answer.hash_version)).collect();
    if without.iter().any(|(_, reason)| reason == GONE) {
        "a part of the state is lost".to_string()
    } else if !without.is_empty() {
        "a part of the state is not served".to_string()
    } else if let Some(missing) = not_asked(answers) {
        missing
    } else if progress().any(|progress| progress.phase() == v1::Phase::Loading) {
        "none yet, the job waits for its weights".to_string()
    } else {
        format!("the servers were between versions ({}): ask again", versions.join(", "))
    }
}

/// Names the job's servers that were not asked; None if all were, or if their list is unknown.
fn not_asked(answers: &Answers) -> Option<String> {
    let placement = answers.iter().find_map(|(_, answer)| answer.placement.as_ref())?;
    let asked = |server: u32| answers.iter().any(|(_, answer)| answer.server == server);
    let of_job = placement.servers.iter().zip(0..);
    let of_job = of_job.filter(|(address, _)| !address.is_empty());
    let all = of_job.clone().count();
    let missing: Vec<&str> =
        of_job.filter(|(_, server)| !asked(*server)).map(|(address, _)| address.as_str()).collect();
    let lack = missing.len();
    // A list of tens of servers is cut.
    let named = missing.iter().take(8).copied().collect::<Vec<_>>().join(",");
    let more = if lack > 8 { format!(" and {} more", lack - 8) } else { String::new() };
    (lack > 0).then(|| {
        format!("none, {lack} of the job's {all} servers are missing from --servers (its workers dial them as {named}{more})")
    })
}

fn decision(commit: &v1::Commit, spec: Option<&v1::JobSpec>) -> String {
    let outcome = if commit.skip { "skipped".to_string() } else { format!("norm {:.4}", commit.norm) };
    let clipped = if !commit.skip && commit.clip_coefficient < 1.0 {
        format!(", clipped by {:.4}", commit.clip_coefficient)
    } else {
        String::new()
    };
    let name = |group: usize| spec.and_then(|spec| spec.groups.get(group)).map_or("", String::as_str);
    let rates: Vec<String> = match commit.groups.as_slice() {
        [one] => vec![one.lr.to_string()],
        several => {
            several.iter().enumerate().map(|(at, hyper)| format!("{} {}", name(at), hyper.lr)).collect()
        }
    };
    format!(
        "step {}: {outcome}{clipped}, loss scale {}, learning rate {}",
        commit.step,
        commit.loss_scale,
        rates.join(", ")
    )
}

fn last_checkpoint(status: &v1::CheckpointStatus) -> String {
    let sealed = match status.name.as_str() {
        "" => "no checkpoint since the server started".to_string(),
        name => {
            format!(
                "last checkpoint {name} of version {}, {} ago",
                status.version,
                ago(status.sealed_unix_ms)
            )
        }
    };
    match status.failure.as_str() {
        "" => sealed,
        failure => format!("{sealed}; the next one FAILED {} ago: {failure}", ago(status.failed_unix_ms)),
    }
}

/// Formats the time since `unix_ms` by this host's clock, which may differ from the server's.
fn ago(unix_ms: u64) -> String {
    let then = UNIX_EPOCH + Duration::from_millis(unix_ms);
    time(SystemTime::now().duration_since(then).unwrap_or_default())
}

fn time(time: Duration) -> String {
    let seconds = time.as_secs();
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        _ => format!("{} h", seconds / 3600),
    }
}

fn drives(answer: &v1::DescribeResponse) -> String {
    let held = format!(
        "drives: {} reserved, {} written",
        human(answer.disk_bytes),
        human(answer.disk_written_bytes)
    );
    let held = if answer.spill.is_empty() { held } else { format!("{held}, spill {}", answer.spill) };
    let Some(wear) = Wear::of(answer) else { return held };
    let pace = format!("{held}: {} a step, {} a day", human(wear.step_bytes), human(wear.day_bytes));
    match wear.days {
        Some(days) => format!("{pace}, the rated {} in {days:.0} days", human(answer.drive_endurance_bytes)),
        None => pace,
    }
}
