//! Data of a job kept from look to look: its last steps, and counters for rates.

use std::{collections::VecDeque, time::Instant};

use longshore_wire::v1;

use super::view::StepView;

/// Steps kept of a job, as many as on the servers.
const KEPT: usize = 512;
/// Looks over which rates are taken.
const LOOKS: usize = 6;

/// Data of a job kept from look to look.
#[derive(Default)]
pub(crate) struct Known {
    pub(super) steps: VecDeque<StepView>,
    counters: VecDeque<Counters>,
}

/// Sums of the counters of a job's servers at one moment.
#[derive(Clone, Copy)]
pub(super) struct Counters {
    pub(super) at: Instant,
    pub(super) pushed: u64,
    pub(super) pulled: u64,
    pub(super) updating: f64,
    pub(super) updated_bytes: f64,
}

impl Known {
    /// Returns the newest known step, after which steps are requested.
    pub(crate) fn last_step(&self) -> u64 {
        self.steps.back().map_or(0, |step| step.step)
    }

    /// Adds new steps. A step that was taken back and decided again replaces the first one.
    pub(super) fn note(&mut self, steps: &[v1::DecidedStep], version: u64) {
        let first = steps.first().map_or(u64::MAX, |step| step.step);
        self.steps.retain(|step| step.step < first && step.step <= version);
        self.steps.extend(steps.iter().map(step_view));
        while self.steps.len() > KEPT {
            self.steps.pop_front();
        }
    }

    pub(super) fn count(&mut self, counters: Counters) {
        // Counters of a restarted server start at 0.
        if self.counters.back().is_some_and(|last| last.pushed > counters.pushed) {
            self.counters.clear();
        }
        self.counters.push_back(counters);
        while self.counters.len() > LOOKS {
            self.counters.pop_front();
        }
    }

    /// Returns the rates of pushes, pulls and updates.
    pub(super) fn rates(&self) -> [Option<f64>; 3] {
        let (Some(then), Some(now)) = (self.counters.front(), self.counters.back()) else { return [None; 3] };
        let spent = (now.at - then.at).as_secs_f64();
        if spent <= 0.0 {
            return [None; 3];
        }
        let per_s = |now: u64, then: u64| Some(now.saturating_sub(then) as f64 / spent);
        let (busy, moved) = (now.updating - then.updating, now.updated_bytes - then.updated_bytes);
        let update = (busy > 0.0 && moved > 0.0).then(|| moved / busy);
        [per_s(now.pushed, then.pushed), per_s(now.pulled, then.pulled), update]
    }
}

fn step_view(step: &v1::DecidedStep) -> StepView {
    StepView {
        step: step.step,
        unix_ms: step.unix_ms,
        seconds: step.seconds,
        skipped: step.skipped,
        norm: step.norm,
        learning_rate: step.learning_rate,
        loss: step.loss,
        exposed_seconds: step.exposed_seconds,
    }
}
