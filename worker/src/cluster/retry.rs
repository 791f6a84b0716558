//! Exponential back-off with jitter: many workers do not call a restarted server at the same instant.

use std::time::Duration;

use crate::host::{self, Instant};

const FIRST: Duration = Duration::from_millis(20);
/// The longest pause. A restarted server is found within a second, and a dead server costs one small packet a second.
const LONGEST: Duration = Duration::from_secs(1);

/// Returns the new end of repeated attempts, after an attempt that began at `asked`. An attempt longer than
/// `deadline` has waited for a server's recovery, so the time begins anew.
pub(crate) fn renewed(end: Instant, asked: Instant, deadline: Duration) -> Instant {
    if asked.elapsed() > deadline { Instant::now() + deadline } else { end }
}

pub(crate) struct Backoff {
    next: Duration,
}

impl Backoff {
    pub(crate) fn new() -> Backoff {
        Backoff { next: FIRST }
    }

    /// Resets the back-off after a success: the next failure starts from the shortest pause.
    pub(crate) fn reset(&mut self) {
        self.next = FIRST;
    }

    /// Returns a random time between half and the whole of the current pause.
    fn draw(&mut self) -> Duration {
        let fraction = host::random() as f64 / u64::MAX as f64;
        let pause = self.next.mul_f64(0.5 + fraction / 2.0);
        self.next = (self.next * 2).min(LONGEST);
        pause
    }

    /// Sleeps for the next pause, at most until `end`. Returns false once `end` is reached. Callers then make no
    /// further attempt: it would have no time, and its error would hide the last real one.
    pub(crate) async fn pause(&mut self, end: Instant) -> bool {
        let (left, pause) = (end.duration_since(Instant::now()), self.draw());
        host::sleep(pause.min(left)).await;
        pause < left
    }
}
