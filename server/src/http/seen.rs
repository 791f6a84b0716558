//! Snapshot of a job for one HTTP request.

use std::{fs, sync::Arc};

use longshore_engine::step::{Phase, Progress, RankProgress};

use crate::jobs::JobHandle;

pub(super) struct Seen {
    pub(super) handle: Arc<JobHandle>,
    pub(super) progress: Progress,
    pub(super) ranks: Vec<RankProgress>,
}

impl Seen {
    pub(super) fn now(handle: Arc<JobHandle>) -> Seen {
        let (progress, ranks) = (handle.job.progress(), handle.job.ranks());
        Seen { handle, progress, ranks }
    }

    pub(super) fn name(&self) -> &str {
        self.handle.job.spec().name.as_str()
    }

    pub(super) fn labels(&self) -> super::families::Labels {
        vec![("job", self.name().to_string())]
    }

    /// Returns the elements of this server's shards, padding included.
    pub(super) fn elements(&self) -> u64 {
        self.handle.elements()
    }

    /// Names the ranks that the next step waits for. Empty if no rank has joined.
    pub(super) fn waiting_for(&self) -> String {
        if self.is_idle() { String::new() } else { self.handle.job.waiting_for().unwrap_or_default() }
    }

    /// Returns true if no rank has joined or all have left. A killed rank counts as joined.
    fn is_idle(&self) -> bool {
        self.ranks.iter().all(|rank| standing(rank) != "joined")
    }

    /// Returns the state of the job on this server, in a word.
    pub(super) fn state(&self) -> &'static str {
        match self.progress.phase {
            _ if self.handle.job.check_alive().is_err() => "failed",
            Phase::Loading => "loading",
            Phase::Training if self.is_idle() => "idle",
            Phase::Training => "training",
            Phase::Paused { .. } => "paused",
        }
    }
}

/// Returns the state of a rank, in a word or two.
pub(super) fn standing(rank: &RankProgress) -> &'static str {
    match (rank.incarnation, rank.left) {
        (None, _) => "never joined",
        (Some(_), true) => "left",
        (Some(_), false) => "joined",
    }
}

/// Returns the resident set of this process, or None if the kernel does not tell.
pub(super) fn resident_bytes() -> Option<u64> {
    let statm = fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = statm.split_whitespace().nth(1)?.parse().ok()?;
    Some(pages * rustix::param::page_size() as u64)
}
