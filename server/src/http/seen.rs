//! Snapshot of a job for one HTTP request.

use std::{fs, sync::Arc};

use longshore_engine::step::{Phase, Progress, RankProgress};

use crate::{jobs::JobHandle, service::Services};

pub(super) struct Seen {
    pub(super) handle: Arc<JobHandle>,
    pub(super) progress: Progress,
    pub(super) ranks: Vec<RankProgress>,
    /// State of each rank, in a word or two.
    pub(super) standings: Vec<&'static str>,
}

impl Seen {
    pub(super) fn now(services: &Services, handle: Arc<JobHandle>) -> Seen {
        let (progress, ranks) = (handle.job.progress(), handle.job.protocol.ranks());
        let standings = ranks.iter().map(|rank| services.standing(&handle, rank)).collect();
        Seen { handle, progress, ranks, standings }
    }

    pub(super) fn name(&self) -> &str {
        self.handle.job.spec().name.as_str()
    }

    pub(super) fn labels(&self) -> super::metrics::Labels {
        vec![("job", self.name().to_string())]
    }

    /// Names the ranks that the next step waits for, killed ones included. Empty if no rank has joined or all have
    /// left.
    pub(super) fn waiting_for(&self) -> String {
        let is_awaited = |standing: &&str| ["joined", "not connected"].contains(standing);
        let awaits = self.standings.iter().any(is_awaited);
        if awaits { self.handle.job.protocol.waiting_for().unwrap_or_default() } else { String::new() }
    }

    /// Returns the state of the job on this server, in a word.
    pub(super) fn state(&self) -> &'static str {
        match self.progress.phase {
            _ if self.handle.job.protocol.check_alive().is_err() => "failed",
            Phase::Loading => "loading",
            Phase::Training if !self.standings.contains(&"joined") => "idle",
            Phase::Training => "training",
            Phase::Paused { .. } => "paused",
        }
    }
}

/// Returns the resident set of this process, or None if the kernel does not tell.
pub(super) fn resident_bytes() -> Option<u64> {
    let statm = fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = statm.split_whitespace().nth(1)?.parse().ok()?;
    Some(pages * rustix::param::page_size() as u64)
}
