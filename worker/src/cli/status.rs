//! `longshore status`: what servers hold, how far jobs are, and what they wait for.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use longshore_proto::{
    FaultKind, Formats, JobSpec, Version,
    checksum::{BlockHash, state_hash},
    wire::{fault_from_status, v1},
};
use tonic::{Response, Status};

use super::{admin::ServersArgs, client::Servers, sizes::human};

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    servers: ServersArgs,
    /// Only this job
    #[arg(long)]
    job: Option<String>,
    /// Leave the state hash out: it reads all of the state
    #[arg(long)]
    no_hash: bool,
    /// One JSON object a job
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let mut servers = Servers::connect(&args.servers.servers)?;
    let lists = servers.each(|mut admin| async move { admin.list_jobs(v1::ListJobsRequest {}).await })?;
    let mut jobs: Vec<String> = lists.iter().flat_map(|(_, list)| list.jobs.clone()).collect();
    jobs.sort();
    jobs.dedup();
    if !args.json {
        for (address, list) in &lists {
            say!("{address}  {} of {} reserved", human(list.memory_reserved), human(list.memory_budget));
        }
    }
    for job in jobs.iter().filter(|job| args.job.as_ref().is_none_or(|named| named == *job)) {
        let request = v1::DescribeRequest { job: job.clone(), state_hash: !args.no_hash };
        let (answers, without) = describe(&mut servers, &request)?;
        if args.json {
            say!("{}", json(job, &answers, &without));
        } else {
            print(job, &answers, &without);
        }
    }
    if jobs.is_empty() && !args.json {
        say!("no jobs");
    }
    Ok(())
}

/// Each server's address and answer.
type Answers = [(String, v1::DescribeResponse)];
type OwnedAnswers = Vec<(String, v1::DescribeResponse)>;
/// Addresses of servers that gave no answer, and why.
type Without = Vec<(String, String)>;

/// The answers of the servers that hold the job, and why the others have none: one that restarted empty, or cannot read
/// its drives, is when a status is wanted most.
fn describe(servers: &mut Servers, request: &v1::DescribeRequest) -> anyhow::Result<(OwnedAnswers, Without)> {
    let found = servers.each(|mut admin| {
        let request = request.clone();
        async move {
            match admin.describe(request).await {
                Ok(answer) => Ok(Response::new(Ok(answer.into_inner()))),
                Err(status) => Ok(Response::new(Err(reason(&status)))),
            }
        }
    })?;
    let (mut answers, mut without) = (Vec::new(), Vec::new());
    for (address, answer) in found {
        match answer {
            Ok(answer) => answers.push((address, answer)),
            Err(reason) => without.push((address, reason)),
        }
    }
    Ok((answers, without))
}

const GONE: &str = "does not hold this job: it restarted, or belongs to another one";

/// Why a server has no answer.
fn reason(status: &Status) -> String {
    let fault = fault_from_status(status, "the server");
    if fault.kind == FaultKind::NotFound && fault.field == "job" {
        return GONE.to_string();
    }
    fault.to_string()
}

/// The hash over all servers; None while they are at different versions, and without a server that owns a part.
fn combined_hash(answers: &Answers) -> Option<(u64, String)> {
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

fn print(job: &str, answers: &Answers, without: &[(String, String)]) {
    say!("\njob {job}");
    let first = answers.first().map(|(_, first)| first);
    if let Some(spec) = first.and_then(|first| first.spec.as_ref()) {
        let elements: u64 = spec.params.iter().map(|param| param.shape.iter().product::<u64>()).sum();
        say!(
            "  {} parameters in {} tensors, {} ranks, {} micro-steps, {}",
            elements,
            spec.params.len(),
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
        if answer.disk_bytes > 0 {
            say!("    {}", drives(answer));
        }
        if let Some(checkpoints) = &answer.checkpoints {
            say!("    {}", last_checkpoint(checkpoints));
        }
        if !answer.waiting_for.is_empty() {
            say!("    waits for {}", answer.waiting_for);
        }
        if !progress.pause_reason.is_empty() {
            say!("    paused: {}", progress.pause_reason);
        }
    }
    for (address, reason) in without {
        say!("  {address}  {reason}");
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
        None if without.iter().any(|(_, reason)| reason == GONE) => {
            say!("  state hash: a part of the state is lost");
        }
        None if !without.is_empty() => say!("  state hash: a part of the state is not served"),
        None => {
            say!("  state hash: the servers are between versions, ask again (or --no-hash was given)")
        }
    }
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

/// As this host's clock has it, which need not be the server's.
fn ago(unix_ms: u64) -> String {
    let then = UNIX_EPOCH + Duration::from_millis(unix_ms);
    let seconds = SystemTime::now().duration_since(then).unwrap_or_default().as_secs();
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

/// What training at the pace it had so far does to a server's drives.
struct Wear {
    step_bytes: u64,
    day_bytes: u64,
    /// Until the drives have taken what they are rated for, counted from new.
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
    let Some(wear) = Wear::of(answer) else { return held };
    let pace = format!("{held}: {} a step, {} a day", human(wear.step_bytes), human(wear.day_bytes));
    match wear.days {
        Some(days) => format!("{pace}, the rated {} in {days:.0} days", human(answer.drive_endurance_bytes)),
        None => pace,
    }
}

fn json(job: &str, answers: &Answers, without: &[(String, String)]) -> serde_json::Value {
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
            "checkpoints": answer.checkpoints.as_ref().map(checkpoints),
            "ranks": answer.ranks.iter().map(rank).collect::<Vec<_>>(),
        })
    });
    let hash = combined_hash(answers);
    let formats = answers.first().and_then(|(_, answer)| formats(answer));
    serde_json::json!({
        "job": job,
        "state_format": formats.map(|formats| formats.state.name()),
        "master_format": formats.map(|formats| formats.master.name()),
        "servers": servers.collect::<Vec<_>>(),
        "servers_without": without.iter().map(|(address, _)| address).collect::<Vec<_>>(),
        "reasons_without": without.iter().map(|(_, reason)| reason).collect::<Vec<_>>(),
        "state_version": hash.as_ref().map(|(version, _)| version),
        "state_hash": hash.map(|(_, hash)| hash),
    })
}
