//! Rate of a job's steps and of their writes, for the forecast of drive wear.

use std::{
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

/// First and last decided step since the job was opened here.
#[derive(Default)]
pub(crate) struct Pace {
    first_and_last: Mutex<Option<(Mark, Mark)>>,
}

#[derive(Clone, Copy)]
struct Mark {
    at: Instant,
    step: u64,
    written: u64,
}

/// Difference between the first and the last mark.
#[derive(Default)]
pub(crate) struct Span {
    pub(crate) steps: u64,
    pub(crate) time: Duration,
    pub(crate) written: u64,
}

impl Pace {
    /// Records a decided step. `written` counts the bytes written to drives so far.
    pub(crate) fn decided(&self, step: u64, written: u64) {
        let now = Mark { at: Instant::now(), step, written };
        let mut marks = self.first_and_last.lock().unwrap_or_else(PoisonError::into_inner);
        *marks = Some((marks.map_or(now, |(first, _)| first), now));
    }

    pub(crate) fn span(&self) -> Span {
        let marks = *self.first_and_last.lock().unwrap_or_else(PoisonError::into_inner);
        marks.map_or_else(Span::default, |(first, last)| Span {
            steps: last.step - first.step,
            time: last.at - first.at,
            written: last.written.saturating_sub(first.written),
        })
    }
}
