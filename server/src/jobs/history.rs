//! Recent decided steps of a job, for the charts of the status page.

use std::{
    collections::VecDeque,
    sync::Mutex,
    time::{Instant, UNIX_EPOCH},
};

use longshore_proto::Commit;
use longshore_wire::v1;
use prometheus_client::metrics::histogram::Histogram;

use crate::lock::lock;

/// Number of steps kept: an hour with steps of 7 s. At 120 bytes a step, a job's history takes 60 KiB.
const KEPT: usize = 512;
/// Bucket bounds of step times, in seconds. Each is about twice the previous.
const BOUNDS: [f64; 16] =
    [0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0];

/// Steps decided since the job was opened here.
pub(crate) struct History {
    seen: Mutex<Seen>,
    seconds: Histogram,
}

#[derive(Default)]
struct Seen {
    last: Option<Instant>,
    steps: VecDeque<Decided>,
    applied: u64,
    skipped: u64,
}

/// A decided step.
#[derive(Clone, Copy, Debug, Default, serde::Serialize)]
pub(crate) struct Decided {
    pub(crate) step: u64,
    /// Time of the decision, in milliseconds since 1970.
    pub(crate) at_ms: u64,
    /// Seconds since the previous decision. None for the first one here.
    pub(crate) seconds: Option<f64>,
    pub(crate) skipped: bool,
    pub(crate) norm: f64,
    pub(crate) clip_coefficient: f64,
    pub(crate) loss_scale: f64,
    /// Learning rate of the first param group.
    pub(crate) learning_rate: f64,
    /// Loss as rank 0 reported it. None if its trainer reports none.
    pub(crate) loss: Option<f64>,
    /// Exposed time of rank 0's trainer in the previous step. None if rank 0 reports none.
    pub(crate) exposed_seconds: Option<f64>,
    /// Counters of the job at the decision, counted since the job was opened here. Differences between successive steps
    /// give rates.
    pub(crate) pushed_bytes: u64,
    pub(crate) pulled_bytes: u64,
    pub(crate) update_seconds: f64,
}

impl Default for History {
    fn default() -> History {
        History { seen: Mutex::default(), seconds: Histogram::new(BOUNDS) }
    }
}

impl Decided {
    /// Returns a step decided now. Rank 0's report is only displayed, so it is unchecked; non-finite numbers are
    /// dropped.
    pub(crate) fn now(commit: &Commit, report: Option<v1::StepReport>) -> Decided {
        let report = report.unwrap_or_default();
        let timed = report.wall_seconds > 0.0 && report.exposed_seconds.is_finite();
        Decided {
            step: commit.step.0,
            at_ms: UNIX_EPOCH.elapsed().map_or(0, |since| since.as_millis() as u64),
            skipped: commit.skip,
            norm: commit.norm,
            clip_coefficient: commit.clip_coefficient,
            loss_scale: commit.loss_scale,
            learning_rate: commit.groups.first().map_or(0.0, |group| group.lr),
            loss: report.loss.filter(|loss| loss.is_finite()),
            exposed_seconds: timed.then_some(report.exposed_seconds),
            ..Decided::default()
        }
    }
}

impl History {
    /// Appends a decision. A step that was taken back is replaced.
    pub(crate) fn note(&self, decided: Decided) {
        let now = Instant::now();
        let mut seen = lock(&self.seen);
        let seconds = seen.last.replace(now).map(|last| (now - last).as_secs_f64());
        if let Some(seconds) = seconds {
            self.seconds.observe(seconds);
        }
        if decided.skipped {
            seen.skipped += 1
        } else {
            seen.applied += 1
        }
        while seen.steps.back().is_some_and(|last| last.step >= decided.step) {
            seen.steps.pop_back();
        }
        if seen.steps.len() == KEPT {
            seen.steps.pop_front();
        }
        seen.steps.push_back(Decided { seconds, ..decided });
    }

    /// Returns the applied and the skipped steps since the job was opened here.
    pub(crate) fn counts(&self) -> (u64, u64) {
        let seen = lock(&self.seen);
        (seen.applied, seen.skipped)
    }

    /// Returns the kept steps after `step`, oldest first.
    pub(crate) fn after(&self, step: u64) -> Vec<Decided> {
        lock(&self.seen).steps.iter().filter(|decided| decided.step > step).copied().collect()
    }

    pub(crate) fn last(&self) -> Option<Decided> {
        lock(&self.seen).steps.back().copied()
    }

    pub(crate) fn seconds(&self) -> &Histogram {
        &self.seconds
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decided(step: u64, skipped: bool) -> Decided {
        Decided { step, skipped, norm: step as f64, ..Decided::default() }
    }

    #[test]
    fn the_newest_steps_are_kept_in_order() {
        let history = History::default();
        (1..=KEPT as u64 + 3).for_each(|step| history.note(decided(step, step % 4 == 0)));
        let steps: Vec<u64> = history.after(0).iter().map(|decided| decided.step).collect();
        assert_eq!(steps, (4..=KEPT as u64 + 3).collect::<Vec<_>>());
        assert_eq!(history.after(KEPT as u64).len(), 3);
        assert_eq!(history.counts(), (KEPT as u64 + 3 - 128, 128));
    }

    #[test]
    fn a_step_decided_again_is_shown_once() {
        let history = History::default();
        [1, 2, 3].into_iter().for_each(|step| history.note(decided(step, false)));
        history.note(Decided { norm: 9.0, ..decided(2, false) });
        let norms: Vec<f64> = history.after(0).iter().map(|decided| decided.norm).collect();
        assert_eq!(norms, [1.0, 9.0]);
    }
}
