//! Settings of a training run: its bits, its place, and its report.

use std::{path::PathBuf, time::Duration};

use longshore_proto::{
    Dtype, Fault, Formats, Hyper, JobName, JobSpec, Param, Rule, Step, TierKind,
    limits::{BLOCK_ELEMENTS, DEFAULT_SHARD_ELEMENTS},
};
use longshore_worker::{
    DelayCorrection,
    device::DeviceChoice,
    loss_scale::{LossScaler, LossScalerOptions},
    pipeline::{Accumulate, PipelineOptions},
    schedule::Schedule,
    session::{GoBack, Transport},
};

use super::gpt::{Config, Gpt, Group};
use crate::access::Access;

/// Settings of a run, after the flags were parsed.
#[derive(Clone, Debug)]
pub struct Settings {
    pub job: JobName,
    /// Addresses. Empty to embed a server in the process.
    pub servers: Vec<String>,
    /// Credentials for these servers; an embedded server needs none.
    pub access: Access,
    /// True if the server is embedded in the process that started this one, and ends with it.
    pub embedded: bool,
    /// True if one launcher started the processes of all ranks, this one among them.
    pub launched: bool,
    pub data: PathBuf,
    pub model: Config,
    pub steps: u64,
    /// Sequences of each rank in a micro-step.
    pub batch: usize,
    pub micro_steps: u32,
    /// True if each rank adds up its micro-steps instead of the servers.
    pub accumulate_on_worker: bool,
    pub world_size: u32,
    /// None means that this process starts all ranks.
    pub rank: Option<u32>,
    pub rule: Rule,
    pub hyper: Hyper,
    pub lr_warmup_steps: u64,
    /// Part of the peak learning rate at the end of its cosine.
    pub lr_floor: f64,
    pub clip: Option<f64>,
    pub delay: u32,
    pub delay_warmup_steps: u64,
    /// Correction of a delayed step's images.
    pub correction: DelayCorrection,
    pub gradient_dtype: Dtype,
    pub image_dtype: Dtype,
    pub loss_scale: LossScale,
    pub seed: u64,
    /// None to choose by the model's size.
    pub shard_elements: Option<u64>,
    /// The tier of the state on servers.
    pub tier: TierKind,
    /// Formats of the state on servers.
    pub formats: Formats,
    pub device: DeviceChoice,
    pub device_budget: Option<u64>,
    pub checkpoint_dir: Option<PathBuf>,
    pub checkpoint_every: u64,
    /// The checkpoint to go back to if servers lack the job. With None such a job starts afresh.
    pub resume: Option<GoBack>,
    /// Folder for the weights at the end.
    pub export: Option<PathBuf>,
    pub export_dtype: Dtype,
    pub eval_every: u64,
    pub eval_batches: usize,
    pub sample_bytes: usize,
    pub prompt: String,
    pub temperature: f64,
    pub transport: Transport,
    pub deadline: Duration,
    pub pause_deadline: Duration,
    /// Update threads of an embedded server; None takes all cores.
    pub threads: Option<usize>,
    /// Memory of an embedded server.
    pub memory: Option<u64>,
    /// Folders of an embedded server's state with tier `nvme`.
    pub state_dirs: Vec<PathBuf>,
    /// Memory in which an embedded server keeps a part of that state.
    pub resident: u64,
    /// Folder of an embedded server's state with tier `shm`.
    pub shm_dir: Option<PathBuf>,
    pub json: bool,
    /// True if an error is printed as one JSON object.
    pub errors_as_json: bool,
    /// True to plot the losses at the end, on a terminal or not.
    pub plot: bool,
    /// True to print the checksum of the weights that each step begins with, for tests.
    pub step_weights: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScale {
    pub mode: LossScaleMode,
    pub options: LossScalerOptions,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LossScaleMode {
    Dynamic,
    Fixed(f64),
}

/// Shards of a small model: enough to show streaming, and to give several servers some each.
const SMALL_MODEL_SHARDS: u64 = 16;

impl Settings {
    pub fn spec(&self, model: &Gpt) -> JobSpec {
        let params: Vec<Param> = model
            .params()
            .iter()
            .map(|param| Param {
                name: param.name.clone(),
                shape: param.shape.iter().map(|&side| side as u64).collect(),
                group: match param.group {
                    Group::Decay => 0,
                    Group::NoDecay => 1,
                },
            })
            .collect();
        let elements: u64 = params.iter().filter_map(Param::elements).sum();
        let shard = elements.div_ceil(SMALL_MODEL_SHARDS).next_multiple_of(BLOCK_ELEMENTS);
        JobSpec {
            groups: vec!["decay".to_string(), "no_decay".to_string()],
            rule: self.rule,
            gradient_dtype: self.gradient_dtype,
            image_dtype: self.image_dtype,
            world_size: self.world_size,
            micro_steps: if self.accumulate_on_worker { 1 } else { self.micro_steps },
            max_delay: self.delay,
            shard_elements: self.shard_elements.unwrap_or(shard.min(DEFAULT_SHARD_ELEMENTS)),
            tier: self.tier,
            formats: self.formats,
            ..JobSpec::new(self.job.clone(), params)
        }
    }

    /// Checks combinations of flags, before anything is started.
    pub(super) fn check(&self) -> anyhow::Result<()> {
        let spec = self.spec(&Gpt::new(self.model)?);
        spec.validate()?;
        self.pipeline_options()?.validate(&spec)?;
        Ok(())
    }

    pub(super) fn pipeline_options(&self) -> Result<PipelineOptions, Fault> {
        let settings = self.clone();
        let hyper = move |step: Step| settings.hypers(step);
        Ok(PipelineOptions {
            schedule: self.schedule(),
            clip: self.clip,
            correction: self.correction,
            accumulate: self.accumulate(),
            ..PipelineOptions::new(self.scaler()?, hyper)
        })
    }

    fn accumulate(&self) -> Accumulate {
        match self.accumulate_on_worker {
            true => Accumulate::OnWorker { micro_steps: self.micro_steps },
            false => Accumulate::OnServers,
        }
    }

    pub fn scaler(&self) -> Result<LossScaler, Fault> {
        match self.loss_scale.mode {
            LossScaleMode::Dynamic => LossScaler::dynamic(self.loss_scale.options),
            LossScaleMode::Fixed(scale) => LossScaler::fixed(scale),
        }
    }

    /// Returns the schedule. Evaluations and the end read the newest version, so a delayed run drains before them.
    pub fn schedule(&self) -> Schedule {
        let (every, last) = (self.eval_every, self.steps);
        match self.delay {
            0 => Schedule::exact(),
            _ => Schedule::delayed(self.delay_warmup_steps)
                .draining_when(move |step| step.0 == last || every > 0 && step.0.is_multiple_of(every)),
        }
    }

    /// Returns the learning rate: linear warm-up, then a cosine down to the floor at the last step.
    pub fn learning_rate(&self, step: Step) -> f64 {
        let (step, warmup) = (step.0 as f64, self.lr_warmup_steps as f64);
        if step <= warmup {
            return self.hyper.lr * step / warmup;
        }
        let rest = (self.steps as f64 - warmup).max(1.0);
        let progress = ((step - warmup) / rest).min(1.0);
        let cosine = 0.5 * (1.0 + (std::f64::consts::PI * progress).cos());
        self.hyper.lr * (self.lr_floor + (1.0 - self.lr_floor) * cosine)
    }

    /// Returns hyperparameters for each group of [`Settings::spec`].
    pub fn hypers(&self, step: Step) -> Vec<Hyper> {
        let decay = Hyper { lr: self.learning_rate(step), ..self.hyper };
        vec![decay, Hyper { weight_decay: 0.0, ..decay }]
    }
}
