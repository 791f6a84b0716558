//! Settings of a training run: its bits, its place, and its report.

use longshore_proto::{
    Fault, Hyper, JobName, JobSpec, Param, Step,
    limits::{BLOCK_ELEMENTS, DEFAULT_SHARD_ELEMENTS},
};
use longshore_worker::{
    pipeline::{Accumulate, PipelineOptions},
    schedule::Schedule,
};

use super::{
    flags::{Accumulator, Flags},
    gpt::{Config, Gpt, Group},
};
use crate::output::Output;

/// Flags of a run, and the checked values that are made of some flags.
#[derive(Clone, Debug)]
pub struct Settings {
    pub(super) flags: Flags,
    pub(super) job: JobName,
    pub model: Config,
    pub(super) out: Output,
}

/// Number of shards of a small model: enough to show streaming, and to give each of several servers some.
const SMALL_MODEL_SHARDS: u64 = 16;

impl Settings {
    /// # Errors
    /// If a flag has a wrong value, or flags contradict each other.
    pub(crate) fn new(flags: Flags, out: Output) -> anyhow::Result<Settings> {
        let model = flags.model()?;
        flags.check()?;
        let settings = Settings { job: JobName::parse("--job", &flags.job)?, model, flags, out };
        settings.check()?;
        Ok(settings)
    }

    /// Parses the words that follow `longshore train`.
    pub fn parse(words: &[&str]) -> anyhow::Result<Settings> {
        #[derive(clap::Parser)]
        #[command(no_binary_name = true)]
        struct Command {
            #[command(flatten)]
            flags: Flags,
        }
        let Command { flags } = clap::Parser::try_parse_from(words)?;
        Settings::new(flags, Output::default())
    }

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
            rule: self.flags.optimizer,
            gradient_dtype: self.flags.gradient_dtype,
            image_dtype: self.flags.weight_dtype,
            world_size: self.flags.world_size,
            micro_steps: if self.accumulates_on_worker() { 1 } else { self.flags.micro_steps },
            max_delay: self.flags.delay,
            shard_elements: self.flags.shard_elements.unwrap_or(shard.min(DEFAULT_SHARD_ELEMENTS)),
            tier: self.flags.tier,
            formats: self.flags.formats(),
            replicas: self.flags.replicas,
            ..JobSpec::new(self.job.clone(), params)
        }
    }

    /// Checks combinations of flags, before anything is started.
    fn check(&self) -> anyhow::Result<()> {
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
            clip: (self.flags.clip > 0.0).then_some(self.flags.clip),
            correction: self.flags.correction.unwrap_or_default(),
            accumulate: self.accumulate(),
            ..PipelineOptions::new(self.flags.scaler()?, hyper)
        })
    }

    fn accumulate(&self) -> Accumulate {
        match self.flags.accumulate {
            Accumulator::Worker => Accumulate::OnWorker { micro_steps: self.flags.micro_steps },
            Accumulator::Servers => Accumulate::OnServers,
        }
    }

    pub(super) fn accumulates_on_worker(&self) -> bool {
        self.flags.accumulate == Accumulator::Worker
    }

    /// Returns the schedule. Evaluations and the end read the newest version, so a delayed run drains before them.
    pub fn schedule(&self) -> Schedule {
        let (every, last) = (self.flags.eval_every, self.flags.steps);
        match self.flags.delay {
            0 => Schedule::exact(),
            _ => Schedule::delayed(self.flags.warmup_steps)
                .draining_when(move |step| step.0 == last || every > 0 && step.0.is_multiple_of(every)),
        }
    }

    /// Returns the learning rate: linear warm-up, then a cosine down to the floor at the last step.
    pub fn learning_rate(&self, step: Step) -> f64 {
        let (step, warmup) = (step.0 as f64, self.flags.lr_warmup_steps as f64);
        if step <= warmup {
            return self.flags.lr * step / warmup;
        }
        let rest = (self.flags.steps as f64 - warmup).max(1.0);
        let progress = ((step - warmup) / rest).min(1.0);
        let cosine = 0.5 * (1.0 + (std::f64::consts::PI * progress).cos());
        self.flags.lr * (self.flags.lr_floor + (1.0 - self.flags.lr_floor) * cosine)
    }

    /// Returns hyperparameters for each group of [`Settings::spec`].
    pub fn hypers(&self, step: Step) -> Vec<Hyper> {
        let decay = Hyper { lr: self.learning_rate(step), ..self.flags.hyper() };
        vec![decay, Hyper { weight_decay: 0.0, ..decay }]
    }
}
