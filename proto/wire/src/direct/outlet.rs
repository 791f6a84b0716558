//! An outlet: the payloads of one stream that wait to be written past h2, between the call's task and that of the connection.

use std::{
    collections::VecDeque,
    ops::Range,
    sync::{Mutex, MutexGuard, PoisonError},
};

use longshore_memory::SharedBytes;

/// The payloads that are to go out on one stream, by their place among the bytes of the stream's DATA frames.
#[derive(Default)]
pub(super) struct Outlet(Mutex<VecDeque<(Range<u64>, SharedBytes)>>);

impl Outlet {
    /// Adds the payload that goes out at `range`, which lies behind all that were added before.
    pub(super) fn put(&self, range: Range<u64>, payload: SharedBytes) {
        self.lock().push_back((range, payload));
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<(Range<u64>, SharedBytes)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many of the `most` bytes from `at` are of one kind, and what takes their place, if anything does.
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

    /// Forgets the payloads before `at`, which have been written.
    pub(super) fn written(&self, at: u64) {
        let mut held = self.lock();
        while held.front().is_some_and(|(range, _)| range.end <= at) {
            held.pop_front();
        }
    }
}
