//! The step in hand: what it must do, what of it is pushed, and how long it held the trainer up.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use longshore_proto::{Fault, Step, Version};
use longshore_wire::v1::StepReport;
use tokio::sync::{oneshot, watch};
use tracing::Span;

use super::{
    driver::Finished,
    outcome::{Made, Timing},
};
use crate::{
    error::{Misuse, Result},
    meter::Shown,
    pull::Reading,
    session::Session,
};

/// What a step must do.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepInputs {
    pub step: Step,
    /// The version to compute with.
    pub reads: Version,
    /// What the loss must be multiplied by.
    pub loss_scale: f64,
}

/// The step between `begin` and `finish`.
pub(super) struct Current {
    pub(super) plan: StepInputs,
    /// Ends once the step is finished here and, on rank 0, decided.
    pub(super) span: Span,
    /// What the pulls of the version in use have in common.
    pub(super) reading: Reading,
    pub(super) started: Instant,
    /// The time spent in `begin`.
    pub(super) begin: Duration,
    /// Which micro-steps have got their assembler.
    pub(super) assembled: Vec<bool>,
    /// How many micro-steps are wholly pushed.
    pub(super) finished: Arc<AtomicU32>,
    /// What the trainer says of its loss, for charts.
    pub(super) loss: Option<f64>,
    pub(super) trainer: Option<oneshot::Sender<Finished>>,
    pub(super) finished_at: watch::Sender<Option<Instant>>,
    pub(super) before: Meters,
    /// What the meters showed at the end of the step before.
    pub(super) moved_before: Meters,
}

/// What the meters of pulls and of pushes show.
#[derive(Clone, Copy)]
pub(super) struct Meters {
    pulls: Shown,
    pushes: Shown,
}

impl Meters {
    pub(super) fn read(session: &Session) -> Meters {
        Meters { pulls: session.pulls.meter.read(), pushes: session.gradients.meter.read() }
    }
}

impl Current {
    /// Notes that a micro-step gets its assembler. Each gets one.
    pub(super) fn assemble(&mut self, micro_step: u32) -> Result<()> {
        match self.assembled.get_mut(micro_step as usize) {
            Some(assembled) if !*assembled => *assembled = true,
            Some(_) => return Err(Misuse("this micro-step has its assembler already").into()),
            None => {
                let limit = format!("below {}, the step's micro-steps", self.assembled.len());
                return Err(
                    Fault::invalid("micro_step", micro_step, limit, "count micro-steps from 0").into()
                );
            }
        }
        Ok(())
    }

    pub(super) fn is_pushed(&self) -> bool {
        self.finished.load(Relaxed) as usize >= self.assembled.len()
    }

    /// What charts show. `before` is the timing of the step before.
    pub(super) fn report(&self, before: Option<Timing>) -> StepReport {
        let before = before.unwrap_or_default();
        StepReport {
            loss: self.loss,
            wall_seconds: before.wall.as_secs_f64(),
            exposed_seconds: before.exposed.as_secs_f64(),
        }
    }

    /// The trainer's half of the step's outcome. `commit` is the time in `finish`.
    pub(super) fn made(&self, meters: Meters, commit: Duration) -> Made {
        let (pulls, pushes) =
            (meters.pulls.since(self.before.pulls), meters.pushes.since(self.before.pushes));
        let (pulled, pushed) =
            (meters.pulls.since(self.moved_before.pulls), meters.pushes.since(self.moved_before.pushes));
        let timing = Timing {
            wall: self.started.elapsed(),
            begin: self.begin,
            weights: pulls.held_up,
            push: pushes.held_up,
            commit,
            exposed: self.begin + pulls.held_up + pushes.held_up + commit,
            pushed_bytes: pushed.bytes,
            pulled_bytes: pulled.bytes,
        };
        Made { read: self.plan.reads, loss_scale: self.plan.loss_scale, timing }
    }
}
