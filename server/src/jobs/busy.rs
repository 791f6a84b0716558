//! How long a job's compute thread was at what.

use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::{Duration, Instant},
};

use longshore_engine::step::Work;

/// The times of a job's works since it was opened here. Reading the clock around a work costs 50 ns, and a work takes
/// milliseconds.
#[derive(Default)]
pub(crate) struct Busy {
    sums: AtomicU64,
    updates: AtomicU64,
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
}
