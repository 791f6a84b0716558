//! The current step: its inputs, its micro-steps with their assemblers, and the time that it held the trainer up.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    time::Duration,
};

use longshore_proto::{Fault, MicroStep, Step, Version};
use longshore_wire::v1::StepReport;
use tokio::sync::{oneshot, watch};
use tracing::Span;

use super::{
    OUTSIDE, Pipeline,
    driver::Finished,
    options::Weights,
    outcome::{Made, Timing},
};
use crate::{
    error::{Misuse, Result},
    host::Instant,
    meter::Shown,
    pull::{Feed, Reading},
    push::{Assembler, Collector, Outbox, Sums},
    session::Session,
};

/// The inputs of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepInputs {
    pub step: Step,
    /// The version to compute with.
    pub reads: Version,
    /// The factor of the loss.
    pub loss_scale: f64,
}

/// The step between `begin` and `finish`.
pub(super) struct Current {
    pub(super) plan: StepInputs,
    /// Ends once the step is finished here and, on rank 0, decided.
    pub(super) span: Span,
    /// The reading that all pulls of the current version share.
    pub(super) reading: Reading,
    pub(super) started: Instant,
    /// Time spent in `begin`.
    pub(super) begin: Duration,
    /// For each micro-step, true once it has its assembler.
    pub(super) assembled: Vec<bool>,
    /// Number of micro-steps that are wholly pushed.
    pub(super) finished: Arc<AtomicU32>,
    /// The loss that the trainer reported, for charts.
    pub(super) loss: Option<f64>,
    pub(super) trainer: Option<oneshot::Sender<Finished>>,
    pub(super) finished_at: watch::Sender<Option<Instant>>,
    pub(super) before: Meters,
    /// Meter readings at the end of the step before.
    pub(super) moved_before: Meters,
}

/// Readings of the two meters: pulls and pushes.
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
    /// Notes that a micro-step gets its only assembler.
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

    /// Returns the report for charts. `before` is the timing of the step before.
    pub(super) fn report(&self, before: Option<Timing>) -> StepReport {
        let before = before.unwrap_or_default();
        StepReport {
            loss: self.loss,
            wall_seconds: before.wall.as_secs_f64(),
            exposed_seconds: before.exposed.as_secs_f64(),
            ..StepReport::default()
        }
    }

    /// Returns the trainer's half of the step's outcome. `commit` is the time in `finish`.
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

impl Pipeline {
    /// Returns the feed of the weights that the current micro-step computes with. [`begin`](Pipeline::begin) has
    /// requested them at the latest.
    ///
    /// # Errors
    /// `Misuse` outside a step, or with `Weights::OnDemand`.
    pub fn weights(&self) -> Result<Feed> {
        self.current()?;
        self.feeds
            .now()
            .cloned()
            .ok_or_else(|| Misuse("the pipeline pulls on demand: use Pipeline::pull").into())
    }

    /// Begins a micro-step, counted from 0, and returns its assembler. Call it once for each micro-step, in order.
    pub fn assembler(&mut self, micro_step: u32) -> Result<Assembler> {
        let Some(current) = &mut self.current else { return Err(OUTSIDE.into()) };
        if self.accumulator.is_some() && current.finished.load(Relaxed) != micro_step {
            return Err(
                Misuse("micro-steps that the worker adds up end one after the other: finish each").into()
            );
        }
        current.assemble(micro_step)?;
        let (plan, reading, finished) = (current.plan, current.reading.clone(), current.finished.clone());
        let gradients = self.session.gradients.clone();
        let ways = gradients.ways(plan.step, matches!(self.options.weights, Weights::Whole));
        let sums = self.accumulator.clone().map(|accumulator| Sums { accumulator, micro_step });
        // A worker that adds up micro-steps sends their mean as one contribution.
        let contribution = MicroStep(if sums.is_some() { 0 } else { micro_step });
        let job = (self.session.spec(), self.session.layout());
        let collector = Collector::new((plan.step, contribution), self.session.rank(), job, ways);
        let outbox = Outbox::new(gradients, plan.loss_scale, reading, finished);
        Ok(Assembler { collector, outbox, feed: self.feeds.now().cloned(), sums })
    }

    /// Returns the reading of the current micro-step's version.
    pub(super) fn reading(&mut self, version: Version) -> Reading {
        match self.feeds.now() {
            Some(feed) => feed.reading().clone(),
            None => self.feeds.shared_reading(version),
        }
    }
}
