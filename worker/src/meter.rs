//! Totals of one direction of a session's payloads: bytes moved, and the time that callers were held up.

use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};

#[derive(Default)]
pub(crate) struct Meter {
    held_up_nanos: AtomicU64,
    bytes: AtomicU64,
}

/// Totals of a meter. The difference of two readings belongs to one step.
#[derive(Clone, Copy)]
pub(crate) struct Shown {
    pub(crate) held_up: Duration,
    pub(crate) bytes: u64,
}

impl Meter {
    pub(crate) fn held_up(&self, waited: Duration) {
        self.held_up_nanos.fetch_add(waited.as_nanos() as u64, Relaxed);
    }

    pub(crate) fn moved(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Relaxed);
    }

    pub(crate) fn read(&self) -> Shown {
        let held_up = Duration::from_nanos(self.held_up_nanos.load(Relaxed));
        Shown { held_up, bytes: self.bytes.load(Relaxed) }
    }
}

impl Shown {
    /// The difference to `before`.
    pub(crate) fn since(self, before: Shown) -> Shown {
        Shown { held_up: self.held_up - before.held_up, bytes: self.bytes - before.bytes }
    }
}
