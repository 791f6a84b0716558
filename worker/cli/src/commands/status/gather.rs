//! Asks every server for its jobs, and reads a status from all answers. A silent server does not hide the others.

use std::time::Duration;

use anyhow::bail;
use longshore_proto::{
    Fault, FaultKind, Formats, JobSpec, Version,
    checksum::{BlockHash, state_hash},
};
use longshore_wire::{Wire, v1};
use longshore_worker::session::whole;

use crate::{
    access::ServersArgs,
    servers::{
        Servers, Silent, Unanswered, brief, is_complete, is_not_there, jobs_of, name_silent, no_such_job,
        standing,
    },
};

/// The longest wait for a state hash: all of the state is read, after the decided updates.
const HASHING: Duration = Duration::from_secs(600);

pub(super) const GONE: &str = "does not hold this job: it restarted, or belongs to another one";

/// Each server's address and answer.
pub(super) type Answers = Vec<(String, v1::DescribeResponse)>;

pub(super) struct Found {
    servers: Servers,
    patience: Duration,
    pub(super) lists: Vec<(String, v1::ListJobsResponse)>,
    pub(super) silent: Silent,
}

impl Found {
    /// Connects, and lists the jobs of all servers.
    ///
    /// # Errors
    /// If no server answers within `patience`.
    pub(super) fn ask(args: &ServersArgs, patience: Duration) -> anyhow::Result<Found> {
        let (mut servers, mut silent) = Servers::reach(&args.servers, &args.access)?;
        let lists = servers.lists(patience, &mut silent);
        if lists.is_empty() {
            return Err(Unanswered::new("", &silent).into());
        }
        Ok(Found { servers, patience, lists, silent })
    }

    pub(super) fn jobs(&self, named: Option<&str>) -> anyhow::Result<Vec<String>> {
        let jobs = jobs_of(&self.lists);
        let Some(named) = named else { return Ok(jobs) };
        if jobs.iter().any(|job| job == named) {
            return Ok(vec![named.to_string()]);
        }
        let silent = if self.silent.is_empty() {
            String::new()
        } else {
            format!(". Not asked: {}", name_silent(&self.silent))
        };
        bail!("{}{silent}", no_such_job(named, &jobs))
    }

    /// Returns the answers of the servers that hold the job, and for each other server why it does not. An operator
    /// needs a status most when a server has restarted empty, cannot read its drives, or is stopped.
    pub(super) fn describe(&self, job: &str, with_steps: bool) -> (Answers, Silent) {
        let steps_after = with_steps.then_some(0);
        let request =
            v1::DescribeRequest { job: job.to_string(), steps_after, ..v1::DescribeRequest::default() };
        let found =
            self.servers.answers_within(self.patience, async |admin| whole(admin, request.clone()).await);
        let (mut answers, mut without) = (Vec::new(), self.silent.clone());
        for (address, answer) in found {
            match answer {
                Ok(answer) => answers.push((address, answer)),
                Err(fault) => without.push((address, reason(&fault))),
            }
        }
        // A server that has left the job lacks nothing, and is no trouble. If there are more servers than shards, the
        // servers without a shard are no trouble either.
        let placements = answers.iter().filter_map(|(_, answer)| answer.placement.as_ref());
        if is_complete(answers.iter().map(|(_, answer)| answer)) {
            without.retain(|(_, reason)| reason != GONE);
        } else if let Some(placement) = placements.max_by_key(|of| of.epoch).filter(|of| of.epoch > 1) {
            without.retain(|(address, reason)| reason != GONE || placement.servers.contains(address));
        }
        (answers, without)
    }
}

/// Adds each server's hashes to its answer. Returns why a server has none.
pub(super) fn hashed(found: &Found, job: &str, answers: &mut Answers) -> Option<String> {
    let request = v1::DescribeRequest { state_hash: true, ..brief(job) };
    let asked: Vec<String> = answers.iter().map(|(address, _)| address.clone()).collect();
    let hashes = found.servers.answers_within(HASHING, async |admin| whole(admin, request.clone()).await);
    let mut failed = None;
    for (address, answer) in hashes.into_iter().filter(|(address, _)| asked.contains(address)) {
        let Some((_, known)) = answers.iter_mut().find(|(known, _)| *known == address) else { continue };
        match answer {
            // The fields beside the hashes are newer too.
            Ok(answer) => {
                let (spec, placement) = (known.spec.take(), known.placement.take());
                let steps = std::mem::take(&mut known.steps);
                *known = v1::DescribeResponse { spec, placement, steps, ..answer };
            }
            Err(fault) => failed = Some(format!("{address} gave none: {fault}")),
        }
    }
    failed
}

fn reason(fault: &Fault) -> String {
    match (fault.kind, fault.field.as_str()) {
        _ if is_not_there(fault) => GONE.to_string(),
        (FaultKind::Unavailable, "job") => format!("is recovering this job: {}", fault.remedy),
        _ => format!("does not serve this job: {fault}"),
    }
}

/// Returns the hash over all servers. None while they are at different versions, or if the owner of a part is
/// missing.
pub(super) fn combined_hash(answers: &[(String, v1::DescribeResponse)]) -> Option<(u64, String)> {
    let first = &answers.first()?.1;
    let layout = JobSpec::from_wire(first.spec.clone()).ok()?.validate().ok()?;
    let (version, applied) = (first.hash_version, first.hash_applied);
    let mut blocks: Vec<(u32, BlockHash)> = Vec::new();
    for (_, answer) in answers {
        if answer.hash_version != version || answer.hash_applied != applied {
            return None;
        }
        for hash in &answer.hashes {
            blocks.push((hash.block, hash.hash.as_ref().try_into().ok()?));
        }
    }
    blocks.sort();
    // A server that is named by two addresses answers twice.
    blocks.dedup();
    let whole = blocks.iter().map(|(block, _)| *block).eq(0..layout.blocks());
    whole.then(|| (version, state_hash(Version(version), applied, blocks.iter().map(|(_, hash)| hash))))
}

pub(super) fn formats(answer: &v1::DescribeResponse) -> Option<Formats> {
    JobSpec::from_wire(answer.spec.clone()).ok().map(|spec| spec.formats)
}

/// Returns the state of a job on a server in a word, as the status page and `top` show it.
pub(super) fn phase(answer: &v1::DescribeResponse) -> &'static str {
    let progress = answer.progress.clone().unwrap_or_default();
    match progress.phase() {
        v1::Phase::Loading => "loading",
        v1::Phase::Training if answer.ranks.iter().all(|rank| standing(rank) != "joined") => "idle",
        v1::Phase::Training => "training",
        v1::Phase::Paused => "paused",
        v1::Phase::Unspecified => "unknown",
    }
}

pub(super) fn last_commit(answers: &Answers) -> Option<&v1::Commit> {
    let commits = answers.iter().filter_map(|(_, answer)| answer.progress.as_ref()?.last_commit.as_ref());
    commits.max_by_key(|commit| commit.step)
}

/// Wear of a server's drives at the pace so far.
pub(super) struct Wear {
    pub(super) step_bytes: u64,
    pub(super) day_bytes: u64,
    /// Days until the drives reach their rated writes, counted from new.
    pub(super) days: Option<f64>,
}

impl Wear {
    /// Returns None before the second step.
    pub(super) fn of(answer: &v1::DescribeResponse) -> Option<Wear> {
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
