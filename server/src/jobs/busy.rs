//! Busy time of a job's compute thread by kind of work, and the length of its queue.

use std::{
    sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    time::{Duration, Instant},
};

use longshore_engine::step::Work;

/// Busy times since the job was opened here. Two clock reads cost 50 ns, and a work takes milliseconds.
#[derive(Default)]
pub(crate) struct Busy {
    sums: AtomicU64,
    updates: AtomicU64,
    /// Works in the compute thread's own queue.
    queued: AtomicUsize,
    /// Works sent to the compute thread and not yet received.
    handed: AtomicUsize,
}

impl Busy {
    /// Runs `perform` and counts its time by the kind of `next`, the first queued work.
    pub(crate) fn count<T>(&self, next: Option<&Work>, perform: impl FnOnce() -> T) -> T {
        let nanos = match next {
            Some(Work::Update { .. }) => &self.updates,
            Some(Work::Sum(_)) | None => &self.sums,
        };
        let started = Instant::now();
        let done = perform();
        nanos.fetch_add(started.elapsed().as_nanos() as u64, Relaxed);
        done
    }

    /// Returns the time of sums, including their statistics.
    pub(crate) fn sums(&self) -> Duration {
        Duration::from_nanos(self.sums.load(Relaxed))
    }

    /// Returns the time of updates. On `nvme` it includes waits for drives.
    pub(crate) fn updates(&self) -> Duration {
        Duration::from_nanos(self.updates.load(Relaxed))
    }

    /// Counts a work sent to the compute thread.
    pub(super) fn handed(&self) {
        self.handed.fetch_add(1, Relaxed);
    }

    /// Counts a work received by the compute thread.
    pub(super) fn taken(&self) {
        self.handed.fetch_sub(1, Relaxed);
    }

    /// Sets the length of the compute thread's queue.
    pub(super) fn has(&self, works: usize) {
        self.queued.store(works, Relaxed);
    }

    /// Returns the works that wait for the compute thread or run there.
    pub(crate) fn queued(&self) -> u64 {
        (self.queued.load(Relaxed) + self.handed.load(Relaxed)) as u64
    }
}
