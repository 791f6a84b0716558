//! How fast a job's steps are decided and what they write, from which the wear of its drives is forecast.

use std::{
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

/// The steps decided since the job was opened here.
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

/// From the first of them to the last.
#[derive(Default)]
pub(crate) struct Span {
    pub(crate) steps: u64,
    pub(crate) time: Duration,
    pub(crate) written: u64,
}

impl Pace {
    /// `written` is how many bytes the drives were given until now.
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
