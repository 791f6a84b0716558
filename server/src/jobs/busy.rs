//! How long a job's compute thread was at what, and how much waits for it.

use std::{
    sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    time::{Duration, Instant},
};

use longshore_engine::step::Work;

/// The times of a job's works since it was opened here. Reading the clock around a work costs 50 ns, and a work takes
/// milliseconds.
#[derive(Default)]
pub(crate) struct Busy {
    sums: AtomicU64,
    updates: AtomicU64,
    /// Works in the compute thread's own queue.
    queued: AtomicUsize,
    /// Works that were handed to it, and that it has not put there yet.
    handed: AtomicUsize,
}

impl Busy {
    /// Performs what `next` is the first of, and counts its time.
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

    /// In sums, with the statistics that are taken with them.
    pub(crate) fn sums(&self) -> Duration {
        Duration::from_nanos(self.sums.load(Relaxed))
    }

    /// In updates. On `nvme` a wait for the drives counts as well.
    pub(crate) fn updates(&self) -> Duration {
        Duration::from_nanos(self.updates.load(Relaxed))
    }

    /// A work was handed to the compute thread.
    pub(super) fn handed(&self) {
        self.handed.fetch_add(1, Relaxed);
    }

    /// The compute thread has taken one of those.
    pub(super) fn taken(&self) {
        self.handed.fetch_sub(1, Relaxed);
    }

    /// So many works are with the compute thread.
    pub(super) fn has(&self, works: usize) {
        self.queued.store(works, Relaxed);
    }

    /// How many works wait for the compute thread or are with it.
    pub(crate) fn queued(&self) -> u64 {
        (self.queued.load(Relaxed) + self.handed.load(Relaxed)) as u64
    }
}
