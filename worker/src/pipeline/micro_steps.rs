//! A micro-step of the pipeline: its weights, and the assembler of its gradient.

use std::{ops::Range, sync::atomic::Ordering::Relaxed};

use longshore_proto::{MicroStep, Version};

use super::{OUTSIDE, Pipeline, options::Weights};
use crate::{
    error::{Misuse, Result},
    pull::{Feed, Reading},
    push::{Assembler, Collector, Outbox, Sums},
};

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

    /// Pulls some flat ranges of the version that the current micro-step computes with, as a stage 3 layer does.
    pub fn pull(&self, order: &[Range<u64>]) -> Result<Feed> {
        let reading = self.current()?.reading.clone();
        self.cluster().waits.check()?;
        Feed::open(&self.session.pulls, reading, order, self.session.spec().image_dtype)
    }

    /// Begins a micro-step, counted from 0, and returns its assembler. Call it once for each micro-step, in order,
    /// before [`weights`](Pipeline::weights) or [`pull`](Pipeline::pull).
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
        let ways = gradients.ways(matches!(self.options.weights, Weights::Whole));
        let sums = self.accumulator.clone().map(|accumulator| Sums { accumulator, micro_step });
        // A worker that adds up micro-steps sends their mean as one contribution.
        let contribution = MicroStep(if sums.is_some() { 0 } else { micro_step });
        let job = (self.session.spec(), self.session.layout());
        let collector = Collector::new((plan.step, contribution), self.session.rank(), job, ways);
        let outbox = Outbox::new(gradients, plan.loss_scale, reading, finished);
        Ok(Assembler::new(collector, outbox, self.feeds.now().cloned(), sums))
    }

    /// Returns the reading of the current micro-step's version.
    pub(super) fn reading(&mut self, version: Version) -> Reading {
        match self.feeds.now() {
            Some(feed) => feed.reading().clone(),
            None => self.feeds.shared_reading(version),
        }
    }
}
