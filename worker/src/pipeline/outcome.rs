//! Outcomes of steps. The trainer knows one half of an outcome, and the decision the other. `Pipeline::outcomes`
//! returns whole outcomes.

use std::{collections::BTreeMap, sync::Mutex, time::Duration};

use longshore_proto::{Step, Version};

use crate::{lock, loss_scale};

/// A decided step.
#[derive(Clone, Debug, PartialEq)]
pub struct StepOutcome {
    pub step: Step,
    /// The version that the gradient was computed with, at least in the first micro-steps.
    pub read: Version,
    /// True on overflow: nothing was updated.
    pub skip: bool,
    /// Global gradient norm before clipping. On ranks other than 0, zero for a skipped step.
    pub norm: f64,
    /// 1 if the gradient was not clipped.
    pub clip_coefficient: f64,
    /// The factor of this step's loss.
    pub loss_scale: f64,
    /// Loss scale of steps that read this step's version.
    pub loss_scale_next: f64,
    /// The first parameter and element that overflowed, on rank 0.
    pub overflow: Option<String>,
    /// The effect on the loss scaler, on rank 0.
    pub scaler: Option<loss_scale::Event>,
    pub timing: Timing,
}

/// The times that a step held up the trainer's thread.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Timing {
    /// From `begin` to the return of `finish`.
    pub wall: Duration,
    /// In `begin`: the wait for decisions that the step needs.
    pub begin: Duration,
    /// The wait for weights that had not arrived.
    pub weights: Duration,
    /// In `put`: the wait for room in the connections' queues.
    pub push: Duration,
    /// In `finish`: the wait for this step's decision, if the next step is exact.
    pub commit: Duration,
    /// The sum of the four waits: the cost of offloading in this step.
    pub exposed: Duration,
    pub pushed_bytes: u64,
    /// Payload bytes that arrived during the step, of any version.
    pub pulled_bytes: u64,
}

/// The decision's half of an outcome.
#[derive(Clone, Debug)]
pub(super) struct Decided {
    pub(super) skip: bool,
    pub(super) norm: f64,
    pub(super) clip_coefficient: f64,
    pub(super) loss_scale_next: f64,
    pub(super) overflow: Option<String>,
    pub(super) scaler: Option<loss_scale::Event>,
}

/// The trainer's half of an outcome.
#[derive(Clone, Debug)]
pub(super) struct Made {
    pub(super) read: Version,
    pub(super) loss_scale: f64,
    pub(super) timing: Timing,
}

#[derive(Default)]
pub(super) struct Outcomes {
    halves: Mutex<BTreeMap<Step, Halves>>,
}

type Halves = (Option<Decided>, Option<Made>);

/// The most outcomes kept for a trainer that does not ask for them.
const MAX_UNREAD: usize = 10_000;

impl Outcomes {
    pub(super) fn decided(&self, step: Step, decided: Decided) {
        self.change(step, |halves| halves.0 = Some(decided));
    }

    pub(super) fn made(&self, step: Step, made: Made) {
        self.change(step, |halves| halves.1 = Some(made));
    }

    fn change(&self, step: Step, change: impl FnOnce(&mut Halves)) {
        let mut halves = lock(&self.halves);
        change(halves.entry(step).or_default());
        while halves.len() > MAX_UNREAD {
            halves.pop_first();
        }
    }

    /// Takes the outcomes of steps that are decided and finished, oldest first.
    pub(super) fn take(&self) -> Vec<StepOutcome> {
        let mut halves = lock(&self.halves);
        let mut taken = Vec::new();
        halves.retain(|&step, halves| match (&halves.0, &halves.1) {
            (Some(decided), Some(made)) => {
                taken.push(join(step, decided, made));
                false
            }
            _ => true,
        });
        taken
    }
}

fn join(step: Step, decided: &Decided, made: &Made) -> StepOutcome {
    StepOutcome {
        step,
        read: made.read,
        skip: decided.skip,
        norm: decided.norm,
        clip_coefficient: decided.clip_coefficient,
        loss_scale: made.loss_scale,
        loss_scale_next: decided.loss_scale_next,
        overflow: decided.overflow.clone(),
        scaler: decided.scaler,
        timing: made.timing,
    }
}
