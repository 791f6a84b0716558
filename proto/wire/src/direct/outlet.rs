//! An outlet: the payloads of one stream that wait to be written past h2. The call's task fills it, and the
//! connection's task drains it.

use std::{
    collections::VecDeque,
    ops::Range,
    sync::{Mutex, MutexGuard, PoisonError},
};

use longshore_memory::SharedBytes;

/// Waiting payloads of one stream, by their position among the bytes of its DATA frames.
#[derive(Default)]
pub(super) struct Outlet(Mutex<VecDeque<(Range<u64>, SharedBytes)>>);

impl Outlet {
    /// Adds a payload for the position `range`, which must lie behind all earlier ones.
    pub(super) fn put(&self, range: Range<u64>, payload: SharedBytes) {
        self.lock().push_back((range, payload));
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<(Range<u64>, SharedBytes)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the length of the uniform run at `at`, up to `most` bytes, and the payload that replaces it, if any.
    pub(super) fn find(&self, at: u64, most: usize) -> (usize, Option<SharedBytes>) {
        let held = self.lock();
        let end = at + most as u64;
        match held.iter().find(|(range, _)| at < range.end) {
            Some((range, bytes)) if range.start <= at => {
                let within = (at - range.start) as usize..(end.min(range.end) - range.start) as usize;
                (within.len(), Some(bytes.slice(within)))
            }
            Some((range, _)) => ((end.min(range.start) - at) as usize, None),
            None => (most, None),
        }
    }

    /// Drops the payloads before `at`, which have been written.
    pub(super) fn written(&self, at: u64) {
        let mut held = self.lock();
        while held.front().is_some_and(|(range, _)| range.end <= at) {
            held.pop_front();
        }
    }
}
