//! How a run makes its steps: schedule, clipping, loss scale, hyperparameters, and which weights it wants when.

use std::{fmt, ops::Range, sync::Arc};

use longshore_proto::{Correction, Fault, Hyper, JobSpec, Step};

use super::correction::DelayCorrection;
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
    /// What makes up for the delay of a delayed schedule.
    pub correction: DelayCorrection,
    pub hyper: HyperOf,
    pub weights: Weights,
}

impl PipelineOptions {
    /// Options for exact steps without clipping, with the whole model.
    pub fn new(
        scaler: LossScaler,
        hyper: impl Fn(Step) -> Vec<Hyper> + Send + Sync + 'static,
    ) -> PipelineOptions {
        PipelineOptions {
            schedule: Schedule::exact(),
            clip: None,
            scaler,
            correction: DelayCorrection::LookAhead,
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
        if self.schedule.delay() > 0 {
            self.correction.validate(spec)?;
        }
        if self.schedule.delay() > spec.max_delay {
            let limit = format!("at most {}, the job's max_delay", spec.max_delay);
            let remedy = "open the job with max_delay 1, or use an exact schedule";
            return Err(Fault::invalid("pipeline.schedule.delay", self.schedule.delay(), limit, remedy));
        }
        Ok(())
    }

    /// The correction of the images that `step` makes. There is one only when no step reads them exactly.
    pub(super) fn correction_of(&self, step: Step) -> Correction {
        let next = Step(step.0 + 1);
        if self.schedule.reads(next) == step.version() {
            return Correction::None;
        }
        let rates = |step| (self.hyper)(step).iter().map(|hyper| hyper.lr).collect();
        match self.correction {
            DelayCorrection::None => Correction::None,
            DelayCorrection::Compensation(c) => Correction::Compensation(c),
            DelayCorrection::LookAhead => Correction::LookAhead(rates(next)),
            DelayCorrection::LookAheadByThisRate => Correction::LookAhead(rates(step)),
        }
    }
}

impl fmt::Debug for PipelineOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PipelineOptions")
            .field("schedule", &self.schedule)
            .field("clip", &self.clip)
            .field("scaler", &self.scaler)
            .field("correction", &self.correction)
            .field("weights", &self.weights)
            .finish_non_exhaustive()
    }
}
