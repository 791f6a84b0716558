//! Options of a pipeline: schedule, clipping, loss scale, hyperparameters, and the weights that it requests.

use std::{
    fmt,
    ops::Range,
    str::FromStr,
    sync::{Arc, Mutex},
};

use longshore_proto::{Correction, Fault, Hyper, JobSpec, Rule, Step, limits::MAX_MICRO_STEPS};

use crate::{error::Result, loss_scale::LossScaler, push::Accumulator, schedule::Schedule, session::Session};

/// Returns the hyperparameters of a step, one set for each param group. Called on rank 0 only.
pub type HyperOf = Arc<dyn Fn(Step) -> Vec<Hyper> + Send + Sync>;

/// The weights that `begin` requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Weights {
    /// The whole model in forward order: one feed for forward and backward (stage 2).
    Whole,
    /// These flat ranges, in this order.
    Ranges(Vec<Range<u64>>),
    /// Nothing: the trainer opens a feed for each layer with `Pipeline::pull` (stage 3).
    OnDemand,
}

/// The place where gradients of a step's micro-steps are added up, in fp32 either way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accumulate {
    /// On the servers: each micro-step's gradient is a contribution, as many as the job's `micro_steps`.
    OnServers,
    /// On each worker, with 4 bytes of host memory per parameter element that the rank contributes to.
    ///
    /// The worker sends one contribution: the mean over the micro-steps, rounded to the wire's type. The job's own
    /// `micro_steps` is 1.
    OnWorker { micro_steps: u32 },
}

impl Accumulate {
    /// Returns the accumulator, if the worker adds up the micro-steps of a step.
    pub(super) fn accumulator(self, session: &Session) -> Result<Option<Arc<Mutex<Accumulator>>>> {
        let Accumulate::OnWorker { micro_steps: micro_steps @ 2.. } = self else { return Ok(None) };
        let (budget, dtype) = (&session.cluster.options.host_budget, session.spec().gradient_dtype);
        let accumulator = Accumulator::new(budget, (session.layout(), session.rank()), dtype, micro_steps)?;
        Ok(Some(Arc::new(Mutex::new(accumulator))))
    }

    /// Number of micro-steps of a step on this rank.
    pub(super) fn micro_steps(self, spec: &JobSpec) -> u32 {
        match self {
            Accumulate::OnServers => spec.micro_steps,
            Accumulate::OnWorker { micro_steps } => micro_steps,
        }
    }

    fn validate(self, spec: &JobSpec) -> Result<(), Fault> {
        let Accumulate::OnWorker { micro_steps } = self else { return Ok(()) };
        if !(1..=MAX_MICRO_STEPS).contains(&micro_steps) {
            let limit = format!("1 to {MAX_MICRO_STEPS}");
            let field = "pipeline.accumulate.micro_steps";
            return Err(Fault::invalid(field, micro_steps, limit, "accumulate fewer micro-steps"));
        }
        if spec.micro_steps != 1 {
            let remedy = "open the job with micro_steps 1, or accumulate on the servers";
            return Err(Fault::invalid(
                "spec.micro_steps",
                spec.micro_steps,
                "1 where the worker accumulates",
                remedy,
            ));
        }
        Ok(())
    }
}

/// Options of a pipeline. Start from [`PipelineOptions::new`]. All ranks must use the same schedule and scaler
/// options.
#[derive(Clone)]
pub struct PipelineOptions {
    pub schedule: Schedule,
    /// The largest global gradient norm; None does not clip.
    pub clip: Option<f64>,
    /// The scaler at version 0. A resumed job continues with the scaler of its last commit.
    pub scaler: LossScaler,
    /// Correction of the images that steps of a delayed schedule read.
    pub correction: DelayCorrection,
    pub accumulate: Accumulate,
    pub hyper: HyperOf,
    pub weights: Weights,
}

impl PipelineOptions {
    /// Options for exact steps of the whole model, without clipping.
    pub fn new(
        scaler: LossScaler,
        hyper: impl Fn(Step) -> Vec<Hyper> + Send + Sync + 'static,
    ) -> PipelineOptions {
        PipelineOptions {
            schedule: Schedule::exact(),
            clip: None,
            scaler,
            correction: DelayCorrection::LookAhead,
            accumulate: Accumulate::OnServers,
            hyper: Arc::new(hyper),
            weights: Weights::Whole,
        }
    }

    /// Checks that a job can be trained with these options. [`Pipeline::new`](super::Pipeline::new) checks again,
    /// but by then the job exists.
    ///
    /// # Errors
    /// `Invalid` for options that contradict each other or the job.
    pub fn validate(&self, spec: &JobSpec) -> Result<(), Fault> {
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
        self.accumulate.validate(spec)?;
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

    /// Returns true if the images that a step makes are corrected: delayed steps read them.
    pub(super) fn corrects(&self, step: Step) -> bool {
        let is_delayed = self.schedule.reads(Step(step.0 + 1)) != step.version();
        is_delayed && !matches!(self.correction, DelayCorrection::None)
    }

    /// Returns the correction of the images that `step` makes. An exact next step reads these images uncorrected.
    pub(super) fn correction_of(&self, step: Step) -> Correction {
        if !self.corrects(step) {
            return Correction::None;
        }
        Correction::LookAhead((self.hyper)(step).iter().map(|hyper| hyper.lr).collect())
    }
}

impl fmt::Debug for PipelineOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PipelineOptions")
            .field("schedule", &self.schedule)
            .field("clip", &self.clip)
            .field("scaler", &self.scaler)
            .field("correction", &self.correction)
            .field("accumulate", &self.accumulate)
            .field("weights", &self.weights)
            .finish_non_exhaustive()
    }
}

/// The difference between the images that delayed steps read and the master weights. docs/delay.md has the
/// measurements.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DelayCorrection {
    /// Images are ahead of the master weights by the known part of the next step. See
    /// [`Rule::can_look_ahead`].
    #[default]
    LookAhead,
    /// Images equal the master weights.
    None,
}

const LOOK_AHEAD: &str = "look-ahead";
const NONE: &str = "none";

impl DelayCorrection {
    pub(super) fn validate(self, spec: &JobSpec) -> Result<(), Fault> {
        if self == DelayCorrection::LookAhead && !spec.rule.can_look_ahead() {
            let rules = Rule::names(Rule::can_look_ahead);
            let limit = format!("a rule with momentum ({rules}) where delayed steps look ahead");
            let remedy = "train exactly, or turn the correction off (none); docs/delay.md says the cost";
            return Err(Fault::invalid("spec.rule", spec.rule, limit, remedy));
        }
        Ok(())
    }
}

impl fmt::Display for DelayCorrection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DelayCorrection::LookAhead => LOOK_AHEAD,
            DelayCorrection::None => NONE,
        })
    }
}

impl FromStr for DelayCorrection {
    type Err = Fault;

    fn from_str(text: &str) -> Result<DelayCorrection, Fault> {
        let retired = ["look-ahead-by-this-rate", "worker-local", "compensation"];
        match text {
            LOOK_AHEAD => Ok(DelayCorrection::LookAhead),
            NONE => Ok(DelayCorrection::None),
            _ => {
                let remedy = match retired.iter().any(|retired| text.starts_with(retired)) {
                    true => "choose look-ahead, which does its work now",
                    false => "name one of them",
                };
                Err(Fault::invalid("correction", text, "look-ahead or none", remedy))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_correction_is_read_back_and_a_retired_one_names_look_ahead() {
        for correction in [DelayCorrection::LookAhead, DelayCorrection::None] {
            assert_eq!(correction.to_string().parse(), Ok(correction));
        }
        for retired in ["worker-local", "worker-local=1.5", "compensation=0.5", "look-ahead-by-this-rate"] {
            let fault = retired.parse::<DelayCorrection>().unwrap_err();
            assert!(fault.value == retired && fault.remedy.contains("look-ahead"), "{fault}");
        }
    }
}
