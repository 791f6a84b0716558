//! `longshore status`: what servers hold, how far jobs are, and what they wait for.

mod gather;

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use longshore_proto::{
    Formats, JobSpec, Version,
    checksum::{BlockHash, state_hash},
};
use longshore_wire::{Wire, v1};

use self::gather::{Answers, Found, GONE, Without, hashed};
use super::admin::ServersArgs;
use crate::{
    output::Output,
    servers::{PROMPTLY, Unanswered},
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
    /// Longest wait, in seconds, for a server to say what it holds
    #[arg(long, default_value_t = PROMPTLY.as_secs(), value_parser = clap::value_parser!(u64).range(1..=3600))]
    deadline_s: u64,
}

/// Prints what the servers that answer say. The result is an error when one does not answer, or when none holds the
/// job that was named.
pub(super) fn run(args: &Args, out: Output) -> anyhow::Result<()> {
    let mut found = Found::ask(&args.servers, Duration::from_secs(args.deadline_s))?;
    if !out.is_json() {
        for (address, list) in &found.lists {
            say!("{address}  {} of {} reserved", human(list.memory_reserved), human(list.memory_budget));
            list.identities.iter().for_each(|identity| say!("  {}", share_of(identity)));
        }
        found.silent.iter().for_each(|(address, why)| say!("{address}  {why}"));
    }
    let jobs = found.jobs(args.job.as_deref())?;
    for job in &jobs {
        let (mut answers, without) = found.describe(job);
        let unhashed =
            if args.no_hash { Some(LEFT_OUT.to_string()) } else { hashed(&mut found, job, &mut answers) };
        if out.is_json() {
            say!("{}", json(job, &answers, &without));
        } else {
            print(job, &answers, &without, unhashed);
        }
    }
    if jobs.is_empty() && !out.is_json() {
        say!("no jobs");
    }
    let asked = found.lists.len() + found.silent.len();
    if !found.silent.is_empty() {
        let lead = format!("{} of {asked} servers did not answer", found.silent.len());
        return Err(Unanswered::with(&found.silent, &lead).into());
    }
    Ok(())
}

/// A job that has no limit and was used within this time is not called idle.
const WORTH_A_WORD: Duration = Duration::from_secs(600);
const LEFT_OUT: &str = "left out, as --no-hash says";

/// The hash over all servers; None while they are at different versions, and without a server that owns a part.
fn combined_hash(answers: &[(String, v1::DescribeResponse)]) -> Option<(u64, String)> {
    let first = &answers.first()?.1;
    let layout = JobSpec::from_wire(first.spec.clone()).ok()?.validate().ok()?;
    let (version, applied) = (first.hash_version, first.hash_applied);
    let mut blocks: Vec<(u32, BlockHash)> = Vec::new();
    for (_, answer) in answers {
        if answer.hash_version != version || answer.hash_applied != applied || answer.hashes.is_empty() {
            return None;
        }
        for hash in &answer.hashes {
            blocks.push((hash.block, hash.hash.as_ref().try_into().ok()?));
        }
    }
    blocks.sort_by_key(|(block, _)| *block);
    let whole = blocks.iter().map(|(block, _)| *block).eq(0..layout.blocks());
    whole.then(|| (version, state_hash(Version(version), applied, blocks.iter().map(|(_, hash)| hash))))
}

fn formats(answer: &v1::DescribeResponse) -> Option<Formats> {
    JobSpec::from_wire(answer.spec.clone()).ok().map(|spec| spec.formats)
}

fn phase(progress: &v1::JobProgress) -> &'static str {
    match progress.phase() {
        v1::Phase::Loading => "loading",
        v1::Phase::Training => "training",
        v1::Phase::Paused => "paused",
        v1::Phase::Unspecified => "unknown",
    }
}

fn print(job: &str, answers: &Answers, without: &Without, unhashed: Option<String>) {
    say!("\njob {job}");
    let first = answers.first().map(|(_, first)| first);
    if let Some(spec) = first.and_then(|first| first.spec.as_ref()) {
        let elements = first.map_or(0, |first| first.parameters);
        say!(
            "  {} parameters in {} tensors, {} ranks, {} micro-steps, {}",
            elements,
            first.map_or(0, |first| first.tensors),
            spec.world_size,
            spec.micro_steps,
            first.and_then(formats).map_or_else(
                || "formats of a newer version".to_string(),
                |formats| format!("master weights {}, state {}", formats.master, formats.state)
            )
        );
    }
    for (address, answer) in answers {
        let Some(progress) = &answer.progress else { continue };
        say!(
            "  {address}  {}  version {} ({} applied)  {}  pushed {}  pulled {}  {} x {}",
            phase(progress),
            progress.version,
            progress.applied,
            human(answer.memory_bytes),
            human(answer.pushed_bytes),
            human(answer.pulled_bytes),
            answer.threads,
            answer.isa
        );
        if let Some(idle) = idle(answer) {
            say!("    {idle}");
        }
        if answer.disk_bytes > 0 {
            say!("    {}", drives(answer));
        }
        if let Some(checkpoints) = &answer.checkpoints {
            say!("    {}", last_checkpoint(checkpoints));
        }
        if !progress.pause_reason.is_empty() {
            say!("    paused: {}{}", progress.pause_reason, way_on(&progress.pause_reason));
        } else if !answer.waiting_for.is_empty() {
            say!("    waits for {}", answer.waiting_for);
        }
    }
    for (address, reason) in without {
        say!("  {address}  {reason}");
    }
    if let Some(commit) = last_commit(answers) {
        say!("  {}", decision(commit, first.and_then(|first| first.spec.as_ref())));
    }
    for rank in first.iter().flat_map(|first| &first.ranks) {
        let state = match (rank.incarnation, rank.left) {
            (0, _) => "never joined",
            (_, true) => "left",
            _ => "joined",
        };
        say!("  rank {}  {state}  {}  last step {}", rank.rank, rank.transport, rank.last_step);
    }
    match combined_hash(answers) {
        Some((version, hash)) => say!("  state hash {hash} at version {version}"),
        None => say!("  state hash: {}", unhashed.unwrap_or_else(|| no_hash(answers, without))),
    }
}

/// What an identity has of a server, and the most that it may have.
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

/// Whose the job is, for how long nobody has used it, and when it goes. None where nothing of that is worth a line.
fn idle(answer: &v1::DescribeResponse) -> Option<String> {
    let owner = (!answer.owner.is_empty()).then(|| format!("of {}", answer.owner));
    let idle = Duration::from_millis(answer.idle_ms);
    let limit = Duration::from_millis(answer.idle_limit_ms);
    let said = match (answer.not_evicted.as_str(), limit.is_zero()) {
        ("", true) => (idle > WORTH_A_WORD).then(|| format!("unused for {}", time(idle))),
        ("", false) => {
            Some(format!("unused for {}, evicted in {}", time(idle), time(limit.saturating_sub(idle))))
        }
        (why, _) => Some(format!("unused for {}, and NOT evicted: {why}", time(idle))),
    };
    let said: Vec<String> = owner.into_iter().chain(said).collect();
    (!said.is_empty()).then(|| said.join(", "))
}

/// What an operator does about a pause whose reason does not say.
fn way_on(reason: &str) -> &'static str {
    if reason.contains("longshore resume") { "" } else { ". `longshore resume` lets it go on" }
}

/// Why the servers' answers make no hash of the whole state.
fn no_hash(answers: &Answers, without: &Without) -> String {
    let progress = || answers.iter().filter_map(|(_, answer)| answer.progress.as_ref());
    let versions: Vec<String> =
        answers.iter().map(|(address, answer)| format!("{} on {address}", answer.hash_version)).collect();
    if without.iter().any(|(_, reason)| reason == GONE) {
        "a part of the state is lost".to_string()
    } else if !without.is_empty() {
        "a part of the state is not served".to_string()
    } else if progress().any(|progress| progress.phase() == v1::Phase::Loading) {
        "none yet, the job waits for its weights".to_string()
    } else {
        format!("the servers were between versions ({}): ask again", versions.join(", "))
    }
}

/// The newest decision that any server knows.
fn last_commit(answers: &Answers) -> Option<&v1::Commit> {
    let commits = answers.iter().filter_map(|(_, answer)| answer.progress.as_ref()?.last_commit.as_ref());
    commits.max_by_key(|commit| commit.step)
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

/// How long ago it was by this host's clock, which need not be the server's.
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

fn checkpoints(status: &v1::CheckpointStatus) -> serde_json::Value {
    let some = |text: &String| (!text.is_empty()).then(|| text.clone());
    serde_json::json!({
        "name": some(&status.name),
        "version": status.version,
        "sealed_unix_ms": status.sealed_unix_ms,
        "failure": some(&status.failure),
        "failed_unix_ms": status.failed_unix_ms,
    })
}

fn rank(rank: &v1::RankStatus) -> serde_json::Value {
    serde_json::json!({
        "rank": rank.rank,
        "joined": rank.incarnation != 0 && !rank.left,
        "transport": rank.transport,
        "last_step": rank.last_step,
    })
}

/// What training does to a server's drives at the pace that it has had so far.
struct Wear {
    step_bytes: u64,
    day_bytes: u64,
    /// How many days until the drives have taken what they are rated for, counted from new.
    days: Option<f64>,
}

impl Wear {
    /// None before the second step.
    fn of(answer: &v1::DescribeResponse) -> Option<Wear> {
        if answer.paced_steps == 0 || answer.paced_written_bytes == 0 || answer.paced_seconds <= 0.0 {
            return None;
        }
        let step_bytes = answer.paced_written_bytes / answer.paced_steps;
        let day_bytes = answer.paced_written_bytes as f64 / answer.paced_seconds * 86_400.0;
        let days = answer.drive_endurance_bytes as f64 / day_bytes;
        let days = (answer.drive_endurance_bytes > 0).then_some(days);
        Some(Wear { step_bytes, day_bytes: day_bytes as u64, days })
    }
}

/// What a job takes of its server's drives.
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

fn json(job: &str, answers: &Answers, without: &Without) -> serde_json::Value {
    let servers = answers.iter().map(|(address, answer)| {
        let progress = answer.progress.clone().unwrap_or_default();
        serde_json::json!({
            "address": address,
            "phase": phase(&progress),
            "version": progress.version,
            "applied": progress.applied,
            "pause_reason": progress.pause_reason,
            "memory_bytes": answer.memory_bytes,
            "pushed_bytes": answer.pushed_bytes,
            "pulled_bytes": answer.pulled_bytes,
            "waiting_for": answer.waiting_for,
            "disk_bytes": answer.disk_bytes,
            "disk_written_bytes": answer.disk_written_bytes,
            "disk_written_bytes_per_step": Wear::of(answer).map(|wear| wear.step_bytes),
            "disk_written_bytes_per_day": Wear::of(answer).map(|wear| wear.day_bytes),
            "drive_endurance_days": Wear::of(answer).and_then(|wear| wear.days),
            "threads": answer.threads,
            "isa": answer.isa,
            "spill": (!answer.spill.is_empty()).then_some(&answer.spill),
            "missing_shards": progress.missing_shards.len(),
            "checkpoints": answer.checkpoints.as_ref().map(checkpoints),
            "owner": (!answer.owner.is_empty()).then_some(&answer.owner),
            "idle_seconds": answer.idle_ms as f64 / 1e3,
            "idle_limit_seconds": (answer.idle_limit_ms > 0).then(|| answer.idle_limit_ms as f64 / 1e3),
            "not_evicted": (!answer.not_evicted.is_empty()).then_some(&answer.not_evicted),
            "ranks": answer.ranks.iter().map(rank).collect::<Vec<_>>(),
        })
    });
    let hash = combined_hash(answers);
    let formats = answers.first().and_then(|(_, answer)| formats(answer));
    let commit = last_commit(answers);
    let first = answers.first().map(|(_, first)| first);
    serde_json::json!({
        "job": job,
        "parameters": first.map(|first| first.parameters),
        "tensors": first.map(|first| first.tensors),
        "last_step": commit.map(|commit| commit.step),
        "skipped": commit.map(|commit| commit.skip),
        // A skipped step has no norm.
        "norm": commit.filter(|commit| !commit.skip).map(|commit| commit.norm),
        "clip_coefficient": commit.map(|commit| commit.clip_coefficient),
        "loss_scale": commit.map(|commit| commit.loss_scale),
        "learning_rates": commit.map(|commit| commit.groups.iter().map(|hyper| hyper.lr).collect::<Vec<_>>()),
        "state_format": formats.map(|formats| formats.state.name()),
        "master_format": formats.map(|formats| formats.master.name()),
        "servers": servers.collect::<Vec<_>>(),
        "servers_without": without.iter().map(|(address, _)| address).collect::<Vec<_>>(),
        "reasons_without": without.iter().map(|(_, reason)| reason).collect::<Vec<_>>(),
        "state_version": hash.as_ref().map(|(version, _)| version),
        "state_hash": hash.map(|(_, hash)| hash),
    })
}
