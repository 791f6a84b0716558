//! The definition of a run: every setting that decides its bits. The worker library and the reference loop
//! both take it.

use longshore_proto::{Dtype, Hyper, JobName, JobSpec, Param, Step, limits::BLOCK_ELEMENTS};
use longshore_worker::{
    Accumulate, DelayCorrection, LossScaler, LossScalerOptions, Pipeline, PipelineOptions, Schedule,
    StepInputs, pipeline::Weights,
};

/// The step, micro-step and rank that determine a batch. A gradient depends on the batch and the weights alone.
#[derive(Clone, Copy, Debug)]
pub struct Batch {
    pub step: u64,
    pub micro_step: u32,
    pub rank: u32,
}

/// A model to train. A run on servers and the reference loop call the same arithmetic, each on its own 16-bit images.
pub trait Model: Send + Sync {
    fn params(&self) -> Vec<Param>;

    fn initial(&self, param: usize) -> Vec<f32>;

    /// Returns the loss, and each parameter's gradient of `scale` times the loss.
    fn gradient(&self, weights: &[Vec<f32>], batch: Batch, scale: f64) -> (f32, Vec<Vec<f32>>);

    /// Computes the same gradient and pushes it through the worker library, as a trainer does. Returns the loss.
    fn micro_step(&self, pipeline: &mut Pipeline, step: StepInputs, batch: Batch) -> anyhow::Result<f32>;
}

#[derive(Clone, Copy, Debug)]
pub enum Scale {
    Fixed(f64),
    Dynamic(LossScalerOptions),
}

/// Settings of a run with delay 1.
#[derive(Clone, Copy, Debug)]
pub struct Delay {
    /// Number of exact steps at the start.
    pub warmup: u64,
    /// Number of steps between evaluations; 0 for none.
    pub drain_every: u64,
    pub correction: DelayCorrection,
}

#[derive(Clone, Copy, Debug)]
pub struct Scenario {
    pub steps: u64,
    pub world: u32,
    pub micro_steps: u32,
    /// Each worker adds up its micro-steps and pushes their mean.
    pub on_worker: bool,
    pub gradient: Dtype,
    pub image: Dtype,
    pub clip: Option<f64>,
    pub delay: Option<Delay>,
    pub scale: Scale,
    pub shard_blocks: u64,
    /// The first use of a weight pulls it (stage 3).
    pub on_demand: bool,
}

impl Scenario {
    /// Returns a run of one exact bf16 rank without clipping.
    pub fn exact(steps: u64) -> Scenario {
        Scenario {
            steps,
            world: 1,
            micro_steps: 1,
            on_worker: false,
            gradient: Dtype::Bf16,
            image: Dtype::Bf16,
            clip: None,
            delay: None,
            scale: Scale::Fixed(1.0),
            shard_blocks: 1,
            on_demand: false,
        }
    }

    pub fn spec(&self, name: &str, model: &dyn Model) -> JobSpec {
        JobSpec {
            groups: vec!["decay".to_string(), "no decay".to_string()],
            gradient_dtype: self.gradient,
            image_dtype: self.image,
            world_size: self.world,
            micro_steps: if self.on_worker { 1 } else { self.micro_steps },
            max_delay: u32::from(self.delay.is_some()),
            shard_elements: self.shard_blocks * BLOCK_ELEMENTS,
            ..JobSpec::new(JobName::parse("name", name).expect("a job's name"), model.params())
        }
    }

    /// Returns hyperparameters with another learning rate at every step, and decay for one group only.
    pub fn hypers(step: u64) -> Vec<Hyper> {
        let lr = 1e-2 / (1.0 + step as f64 / 7.0);
        let decay = Hyper { lr, weight_decay: 0.1, beta2: 0.99, ..Hyper::default() };
        vec![decay, Hyper { weight_decay: 0.0, eps: 1e-6, ..decay }]
    }

    pub fn pipeline(&self) -> PipelineOptions {
        let scaler = match self.scale {
            Scale::Fixed(scale) => LossScaler::fixed(scale),
            Scale::Dynamic(options) => LossScaler::dynamic(options),
        };
        let schedule = match self.delay {
            None => Schedule::exact(),
            Some(Delay { warmup, drain_every, .. }) => {
                Schedule::delayed(warmup).draining_when(move |step| step.0.is_multiple_of(drain_every))
            }
        };
        PipelineOptions {
            schedule,
            clip: self.clip,
            correction: self.delay.map_or(DelayCorrection::None, |delay| delay.correction),
            accumulate: match self.on_worker {
                true => Accumulate::OnWorker { micro_steps: self.micro_steps },
                false => Accumulate::OnServers,
            },
            weights: if self.on_demand { Weights::OnDemand } else { Weights::Whole },
            ..PipelineOptions::new(scaler.expect("a loss scale"), |step: Step| Scenario::hypers(step.0))
        }
    }

    /// Returns whether an evaluation follows a step.
    pub fn evaluates_after(&self, step: u64) -> bool {
        self.delay.is_some_and(|delay| delay.drain_every > 0 && step.is_multiple_of(delay.drain_every))
    }
}
