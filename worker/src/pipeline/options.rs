//! How a run makes its steps: schedule, clipping, loss scale, hyperparameters, and which weights it wants when.

use std::{fmt, ops::Range, sync::Arc};

use longshore_proto::{Fault, Hyper, JobSpec, Step};

use crate::{loss_scale::LossScaler, schedule::Schedule};

/// The hyperparameters of a step, one for each param group. It is called on rank 0 only.
pub type HyperOf = Arc<dyn Fn(Step) -> Vec<Hyper> + Send + Sync>;

/// What `begin` has pulled, or starts to pull.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Weights {
    /// The whole model, in forward order: one feed for forward and backward (stage 2).
    Whole,
    /// These flat ranges, in this order.
    Ranges(Vec<Range<u64>>),
    /// Nothing: the trainer opens a feed for each layer with `Pipeline::pull` (stage 3).
    OnDemand,
}

/// Start from [`PipelineOptions::new`]. All ranks must use the same schedule and scaler options.
#[derive(Clone)]
pub struct PipelineOptions {
    pub schedule: Schedule,
    /// The largest global gradient norm; None does not clip.
    pub clip: Option<f64>,
    /// The scaler at version 0. A resumed job continues with the scaler of its last commit.
    pub scaler: LossScaler,
    /// A number c in [0, 1] for the images that delayed steps read. It needs a delayed schedule.
    pub compensation: f64,
    pub hyper: HyperOf,
    pub weights: Weights,
}

impl PipelineOptions {
    /// Options for exact steps without clipping and compensation, with the whole model.
    pub fn new(
        scaler: LossScaler,
        hyper: impl Fn(Step) -> Vec<Hyper> + Send + Sync + 'static,
    ) -> PipelineOptions {
        PipelineOptions {
            schedule: Schedule::exact(),
            clip: None,
            scaler,
            compensation: 0.0,
            hyper: Arc::new(hyper),
            weights: Weights::Whole,
        }
    }

    pub(super) fn validate(&self, spec: &JobSpec) -> Result<(), Fault> {
        if let Some(clip) = self.clip
            && !(clip.is_finite() && clip > 0.0)
        {
            return Err(Fault::invalid(
                "pipeline.clip",
                clip,
                "finite and above 0",
                "use None for no clipping",
            ));
        }
        if spec.unchecked && (self.clip.is_some() || self.scaler.is_dynamic()) {
            let (field, remedy) =
                ("spec.unchecked", "do not clip and fix the loss scale, or open the job checked");
            return Err(Fault::invalid(field, true, "false with clipping or a dynamic loss scale", remedy));
        }
        if !(0.0..=1.0).contains(&self.compensation) {
            return Err(Fault::invalid(
                "pipeline.compensation",
                self.compensation,
                "in [0, 1]",
                "0 turns it off",
            ));
        }
        if self.compensation > 0.0 && self.schedule.delay() == 0 {
            let remedy = "exact steps need no compensation: use 0, or a delayed schedule";
            return Err(Fault::invalid(
                "pipeline.compensation",
                self.compensation,
                "0 for exact steps",
                remedy,
            ));
        }
        if self.schedule.delay() > spec.max_delay {
            let limit = format!("at most {}, the job's max_delay", spec.max_delay);
            let remedy = "open the job with max_delay 1, or use an exact schedule";
            return Err(Fault::invalid("pipeline.schedule.delay", self.schedule.delay(), limit, remedy));
        }
        Ok(())
    }

    /// The c of the image that `step` makes. It is not 0 only when no step reads that image exactly.
    pub(super) fn compensation_of(&self, step: Step) -> f64 {
        let exact = self.schedule.reads(Step(step.0 + 1)) == step.version();
        if exact { 0.0 } else { self.compensation }
    }
}

impl fmt::Debug for PipelineOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PipelineOptions")
            .field("schedule", &self.schedule)
            .field("clip", &self.clip)
            .field("scaler", &self.scaler)
            .field("compensation", &self.compensation)
            .field("weights", &self.weights)
            .finish_non_exhaustive()
    }
}
