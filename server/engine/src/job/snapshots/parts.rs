//! Progress of the parts of checkpoints that are being written.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

/// The bytes of a job's parts that are being written. Two parts may be in progress, and count together.
#[derive(Debug, Default)]
pub(crate) struct PartsUnderWay {
    written: AtomicU64,
    all: AtomicU64,
}

impl PartsUnderWay {
    /// Begins a part of about `bytes` bytes. The part counts until the returned value is dropped.
    pub(crate) fn begin(self: &Arc<Self>, bytes: u64) -> PartUnderWay {
        self.all.fetch_add(bytes, Relaxed);
        PartUnderWay { of: Arc::clone(self), written: AtomicU64::new(0), bytes }
    }

    /// Returns the written bytes, and their total. None if no part is being written.
    pub(crate) fn now(&self) -> Option<(u64, u64)> {
        let all = self.all.load(Relaxed);
        (all > 0).then(|| (self.written.load(Relaxed).min(all), all))
    }
}

/// A part that is being written.
pub(crate) struct PartUnderWay {
    of: Arc<PartsUnderWay>,
    written: AtomicU64,
    bytes: u64,
}

impl PartUnderWay {
    pub(crate) fn add(&self, bytes: u64) {
        self.written.fetch_add(bytes, Relaxed);
        self.of.written.fetch_add(bytes, Relaxed);
    }
}

impl Drop for PartUnderWay {
    fn drop(&mut self) {
        self.of.all.fetch_sub(self.bytes, Relaxed);
        self.of.written.fetch_sub(self.written.load(Relaxed), Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_count_together_and_leave_nothing() {
        let parts = Arc::<PartsUnderWay>::default();
        assert_eq!(parts.now(), None);
        let first = parts.begin(100);
        first.add(30);
        let second = parts.begin(50);
        second.add(5);
        assert_eq!(parts.now(), Some((35, 150)));
        drop(first);
        assert_eq!(parts.now(), Some((5, 50)));
        drop(second);
        assert_eq!(parts.now(), None);
    }
}
