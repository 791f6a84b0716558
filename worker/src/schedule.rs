//! Which version a step computes with. It is a pure function of the step, so that a restarted worker does the same.

use std::{fmt, sync::Arc};

use longshore_proto::{Step, Version};

/// How many steps are exact before the delay starts: the first steps move the weights most. ZeRO-Offload has 40. With 100
/// the default job loses 0.046 nats of exact steps in 2000 steps, and with 300 nothing that shows (docs/delay.md).
pub const DEFAULT_WARMUP_STEPS: u64 = 300;

/// Which steps are exact and which are delayed, and which micro-steps compute with newer weights.
#[derive(Clone)]
pub struct Schedule {
    /// The delay: 0 or 1 steps.
    delay: u32,
    /// How many steps are exact before the delay starts.
    warmup_steps: u64,
    drains: Drains,
    /// The first micro-step of a delayed step that computes with the version before the step.
    newer_from: Option<u32>,
}

#[derive(Clone)]
enum Drains {
    Never,
    Every(u64),
    When(Arc<dyn Fn(Step) -> bool + Send + Sync>),
}

impl fmt::Debug for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let drains = match self.drains {
            Drains::Never => "never".to_string(),
            Drains::Every(period) => format!("every {period}"),
            Drains::When(_) => "by a function".to_string(),
        };
        write!(
            f,
            "Schedule {{ delay: {}, warmup_steps: {}, drains: {drains}, newer_from: {:?} }}",
            self.delay, self.warmup_steps, self.newer_from
        )
    }
}

impl Schedule {
    /// Every step reads the version before it.
    pub fn exact() -> Schedule {
        Schedule { delay: 0, warmup_steps: 0, drains: Drains::Never, newer_from: None }
    }

    /// After `warmup_steps` exact steps, every step reads the version one further back.
    pub fn delayed(warmup_steps: u64) -> Schedule {
        Schedule { delay: 1, warmup_steps, drains: Drains::Never, newer_from: None }
    }

    /// Drains after every `period`-th step, for an evaluation for example. With 0 it never drains.
    pub fn draining_every(self, period: u64) -> Schedule {
        let drains = if period == 0 { Drains::Never } else { Drains::Every(period) };
        Schedule { drains, ..self }
    }

    /// Drains after the steps for which `when` holds. It must depend on the step alone.
    pub fn draining_when(self, when: impl Fn(Step) -> bool + Send + Sync + 'static) -> Schedule {
        Schedule { drains: Drains::When(Arc::new(when)), ..self }
    }

    /// Lets the micro-steps of a delayed step, from `micro_step` on, compute with newer weights: the version before the
    /// step. If the servers take less time than the micro-steps before `micro_step`, that version has arrived by then,
    /// and only those earlier micro-steps compute with old weights. `micro_step` does not depend on how fast the
    /// servers are, so that a resumed run has the same bits.
    ///
    /// A step has one loss scale. If the newer version has another one than the version that the step reads at first,
    /// no micro-step computes with the newer version.
    pub fn newer_from(self, micro_step: u32) -> Schedule {
        Schedule { newer_from: Some(micro_step), ..self }
    }

    /// The newer version that a micro-step of `step` computes with, if it is not the one that the step [reads](Self::reads)
    /// at first.
    pub fn newer(&self, step: Step, micro_step: u32) -> Option<Version> {
        let newest = Version(step.0.saturating_sub(1));
        let is_due = self.newer_from.is_some_and(|first| micro_step >= first);
        (is_due && self.reads(step) != newest).then_some(newest)
    }

    /// Whether any of so many micro-steps of a delayed step computes with newer weights.
    pub(crate) fn has_newer(&self, micro_steps: u32) -> bool {
        self.newer_from.is_some_and(|first| first < micro_steps)
    }

    /// The `max_delay` that the job needs for this.
    pub fn delay(&self) -> u32 {
        self.delay
    }

    /// Whether a delayed schedule drains after `step`: the next step then reads the version that `step` makes.
    pub fn drains_after(&self, step: Step) -> bool {
        match &self.drains {
            Drains::Never => false,
            Drains::Every(period) => step.0.is_multiple_of(*period),
            Drains::When(when) => when(step),
        }
    }

    /// The version that `step` computes with, at least its first micro-steps. Steps count from 1.
    pub fn reads(&self, step: Step) -> Version {
        let previous = step.0.saturating_sub(1);
        let exact = self.delay == 0 || step.0 <= self.warmup_steps || self.drains_after(Step(previous));
        Version(if exact { previous } else { previous.saturating_sub(1) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(schedule: &Schedule, steps: u64) -> Vec<u64> {
        (1..=steps).map(|step| schedule.reads(Step(step)).0).collect()
    }

    #[test]
    fn exact_reads_the_version_before() {
        assert_eq!(table(&Schedule::exact(), 5), [0, 1, 2, 3, 4]);
    }

    #[test]
    fn delay_starts_after_warmup() {
        assert_eq!(table(&Schedule::delayed(0), 5), [0, 0, 1, 2, 3]);
        assert_eq!(table(&Schedule::delayed(1), 5), [0, 0, 1, 2, 3]);
        assert_eq!(table(&Schedule::delayed(3), 7), [0, 1, 2, 2, 3, 4, 5]);
    }

    #[test]
    fn later_micro_steps_of_delayed_steps_read_the_newest_version() {
        let schedule = Schedule::delayed(2).draining_every(4).newer_from(2);
        let read = |step, micro_step| schedule.newer(Step(step), micro_step).map(|version| version.0);
        assert_eq!((1..=6).map(|step| read(step, 1)).collect::<Vec<_>>(), [None; 6]);
        let expected = [None, None, Some(2), Some(3), None, Some(5)];
        for late in [2, 3] {
            assert_eq!((1..=6).map(|step| read(step, late)).collect::<Vec<_>>(), expected);
        }
        assert_eq!(Schedule::exact().newer_from(0).newer(Step(5), 3), None);
        assert_eq!(Schedule::delayed(0).newer(Step(5), 3), None);
    }

    #[test]
    fn the_step_after_a_drain_reads_the_drained_version() {
        assert_eq!(table(&Schedule::delayed(1).draining_every(4), 9), [0, 0, 1, 2, 4, 4, 5, 6, 8]);
        let schedule = Schedule::delayed(0).draining_when(|step| step.0 == 3);
        assert_eq!(table(&schedule, 6), [0, 0, 1, 3, 3, 4]);
    }
}
