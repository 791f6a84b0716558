//! Debts of the drives: requests without an answer, and the time since the last answer. The pager and the gradient
//! files keep their own, each under a lock.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use longshore_proto::{Fault, FaultKind};

use super::super::fault::FIELD;
use crate::io::SILENCE;

/// Debts of each drive.
pub(super) struct Debts {
    drives: Vec<Debt>,
}

#[derive(Clone, Copy)]
struct Debt {
    requests: usize,
    /// Time of the last answer, or of the first request after all were answered.
    since: Instant,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct Silent {
    pub(super) drive: usize,
    pub(super) requests: usize,
    pub(super) seconds: u64,
}

impl Silent {
    pub(super) fn fault(&self, path: &Path) -> Fault {
        let path = path.display();
        let value = format!("{path} (silent for {} s, owing {} answers)", self.seconds, self.requests);
        let remedy = "see the kernel's log for the device";
        Fault::new(FaultKind::Deadline, FIELD, value, "answering", remedy)
    }
}

impl Debts {
    pub(super) fn new(drives: usize) -> Debts {
        Debts { drives: vec![Debt { requests: 0, since: Instant::now() }; drives] }
    }

    pub(super) fn asked(&mut self, drive: usize, now: Instant) {
        let debt = &mut self.drives[drive];
        if debt.requests == 0 {
            debt.since = now;
        }
        debt.requests += 1;
    }

    pub(super) fn answered(&mut self, drive: usize, now: Instant) {
        let debt = &mut self.drives[drive];
        debt.requests = debt.requests.saturating_sub(1);
        debt.since = now;
    }

    fn owing(&self) -> impl Iterator<Item = (usize, Debt)> {
        self.drives.iter().copied().enumerate().filter(|(_, debt)| debt.requests > 0)
    }

    /// Returns the time to wait before the next check.
    pub(super) fn patience(&self, now: Instant) -> Duration {
        let left =
            |(_, debt): (usize, Debt)| SILENCE.saturating_sub(now.saturating_duration_since(debt.since));
        self.owing().map(left).min().unwrap_or(SILENCE)
    }

    pub(super) fn silent(&self, now: Instant) -> Option<Silent> {
        self.owing().find_map(|(drive, Debt { requests, since })| {
            let silent = now.saturating_duration_since(since);
            (silent >= SILENCE).then_some(Silent { drive, requests, seconds: silent.as_secs() })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_drive_that_owes_an_answer_is_silent() {
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        let mut debts = Debts::new(2);
        assert_eq!(debts.silent(start + 10 * SILENCE), None, "nothing was asked of it");
        debts.asked(1, start);
        debts.asked(1, start + 100 * second);
        assert_eq!(debts.silent(start + SILENCE - second), None);
        assert_eq!(debts.patience(start + SILENCE - second), second);
        // An answer shows that the drive lives, though it owes other answers.
        debts.answered(1, start + SILENCE - second);
        assert_eq!(debts.silent(start + 2 * SILENCE - 2 * second), None);
        let silent = Silent { drive: 1, requests: 1, seconds: SILENCE.as_secs() };
        assert_eq!(debts.silent(start + 2 * SILENCE - second), Some(silent));
        debts.answered(1, start + 3 * SILENCE);
        debts.asked(0, start + 9 * SILENCE);
        // The time before the drive's first request does not count.
        assert_eq!(debts.silent(start + 9 * SILENCE + 179 * second), None);
        assert_eq!(debts.patience(start + 9 * SILENCE), SILENCE);
    }
}
