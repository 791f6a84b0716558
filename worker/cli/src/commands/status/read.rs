//! Reads a job's status from the answers of all servers, for text and JSON.

use longshore_proto::{
    Formats, JobSpec, Version,
    checksum::{BlockHash, state_hash},
};
use longshore_wire::{Wire, v1};

use super::gather::Answers;

/// Returns the hash over all servers. None while they are at different versions, or if the owner of a part is
/// missing.
pub(super) fn combined_hash(answers: &[(String, v1::DescribeResponse)]) -> Option<(u64, String)> {
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

pub(super) fn formats(answer: &v1::DescribeResponse) -> Option<Formats> {
    JobSpec::from_wire(answer.spec.clone()).ok().map(|spec| spec.formats)
}

pub(super) fn phase(progress: &v1::JobProgress) -> &'static str {
    match progress.phase() {
        v1::Phase::Loading => "loading",
        v1::Phase::Training => "training",
        v1::Phase::Paused => "paused",
        v1::Phase::Unspecified => "unknown",
    }
}

/// Returns the newest decision that any server knows.
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
