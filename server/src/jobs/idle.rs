//! For how long nobody has used a job.

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use longshore_engine::{
    job::Job,
    step::{Phase, Progress, RankProgress, Restoring},
};
use longshore_proto::Version;

/// What a look at a job finds changed if it was used since the last one. Looks are a second apart, so that calls need not
/// note anything.
#[derive(PartialEq)]
struct Sign {
    /// Payload pushed and pulled.
    traffic: (u64, u64),
    version: Version,
    phase: Phase,
    /// How far it is filled.
    missing: usize,
    restoring: Option<Restoring>,
    ranks: Vec<RankProgress>,
    /// How many restores have begun. Those that only verify change nothing else.
    restores: u64,
}

impl Sign {
    fn of(job: &Job, restores: u64) -> Sign {
        let Progress { version, phase, missing, restoring, .. } = job.progress();
        let (traffic, missing, ranks) = (job.traffic(), missing.len(), job.ranks());
        Sign { traffic, version, phase, missing, restoring, ranks, restores }
    }
}

pub(crate) struct Idle(Mutex<State>);

struct State {
    sign: Sign,
    since: Instant,
    /// Why the job stays although it has idled for too long.
    stays: Option<String>,
}

impl Idle {
    pub(super) fn new(job: &Job) -> Idle {
        Idle(Mutex::new(State { sign: Sign::of(job, 0), since: Instant::now(), stays: None }))
    }

    /// Looks, and says for how long the job has been unused. It is told how many restores have begun, and whether one is under way.
    pub(super) fn look(&self, job: &Job, (restores, restoring): (u64, bool)) -> Duration {
        let sign = Sign::of(job, restores);
        let mut state = self.lock();
        if state.sign != sign || restoring || job.is_being_copied() {
            *state = State { sign, since: Instant::now(), stays: None };
        }
        state.since.elapsed()
    }

    /// Notes why the job stays. Returns false where that was known.
    pub(crate) fn stays(&self, why: &str) -> bool {
        let mut state = self.lock();
        let known = state.stays.as_deref() == Some(why);
        state.stays = Some(why.to_string());
        !known
    }

    /// Why the job stays; empty where it has not been asked to go.
    pub(crate) fn why_it_stays(&self) -> String {
        self.lock().stays.clone().unwrap_or_default()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
