//! Settings of a job and of its transport, from Python.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use longshore_proto::{
    Fault, Formats, Hyper, JobName, JobSpec, Lifetime, Param, Partition, Rank, Step, TierKind,
};
use longshore_worker::{
    Accumulate, Interrupt, LossScaler, LossScalerOptions, Options, PipelineOptions, Schedule,
    pipeline::Weights,
};
use pyo3::{FromPyObject, pyfunction};

/// Returns true if servers keep the state of a tier's jobs on drives.
#[pyfunction]
pub(crate) fn lies_on_drives(tier: &str) -> bool {
    tier.parse().is_ok_and(|tier: TierKind| tier.properties().lifetime == Lifetime::Drive)
}

/// `longshore.transfer.job.Settings`: the options that `longshore.transfer.options.Options` documents, with every
/// default resolved, and the job's layout. Options that only Python reads are left out.
#[derive(FromPyObject)]
pub(crate) struct Settings {
    servers: Vec<String>,
    tls_dir: Option<PathBuf>,
    job: String,
    /// Name, shape and param group of each parameter.
    params: Vec<(String, Vec<u64>, u32)>,
    groups: Vec<String>,
    rule: String,
    gradient_dtype: String,
    image_dtype: String,
    rank: u32,
    world_size: u32,
    /// The largest number of ranks that the job shall have; None for `world_size`.
    max_ranks: Option<u32>,
    /// First parameter of each partition, and the rank that contributes to it. Empty if all ranks contribute to
    /// all.
    partitions: Vec<(u32, u32)>,
    /// First of the frozen parameters, which come last; None if all are trained.
    frozen_from: Option<u32>,
    accumulate: u32,
    accumulate_on: String,
    delay: u32,
    warmup_steps: u64,
    correction: String,
    max_grad_norm: Option<f64>,
    loss_scale: Option<GivenScaler>,
    missing_gradients: String,
    shard_elements: u64,
    tier: String,
    replicas: u32,
    state: String,
    master: String,
    seed: u64,
    transport: String,
    deadline: f64,
}

/// `longshore.transfer.options.LossScale`, field by field.
#[derive(FromPyObject)]
pub(crate) struct GivenScaler {
    dynamic: bool,
    initial: f64,
    window: u64,
    hysteresis: u32,
    consecutive_hysteresis: bool,
    min: f64,
}

/// Hyperparameters of a param group for one step.
#[derive(FromPyObject)]
pub(crate) struct GivenHyper {
    lr: f64,
    beta1: f64,
    beta2: f64,
    eps: f64,
    weight_decay: f64,
    momentum: f64,
    dampening: f64,
    nesterov: bool,
    lr_decay: f64,
    momentum_decay: f64,
}

impl From<GivenHyper> for Hyper {
    fn from(given: GivenHyper) -> Hyper {
        Hyper {
            lr: given.lr,
            beta1: given.beta1,
            beta2: given.beta2,
            eps: given.eps,
            weight_decay: given.weight_decay,
            momentum: given.momentum,
            dampening: given.dampening,
            nesterov: given.nesterov,
            lr_decay: given.lr_decay,
            momentum_decay: given.momentum_decay,
        }
    }
}

/// Decisions that Python makes step by step: a step's hyperparameters at its end, and the steps after which the
/// pipeline drains.
#[derive(Clone, Default)]
pub(crate) struct StepByStep(Arc<Mutex<Said>>);

#[derive(Default)]
struct Said {
    hypers: BTreeMap<Step, Vec<Hyper>>,
    drained: BTreeSet<Step>,
}

/// Number of steps whose values are kept: a step is decided before Python is this many steps further.
const STEPS_KEPT: usize = 8;

impl StepByStep {
    pub(crate) fn set_hypers(&self, step: Step, hypers: Vec<Hyper>) {
        let said = &mut *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        said.hypers.insert(step, hypers);
        while said.hypers.len() > STEPS_KEPT {
            said.hypers.pop_first();
        }
    }

    /// Returns the hyperparameters of the step, or of the newest earlier step if schedulers have not set the
    /// step's yet.
    fn hypers(&self, step: Step) -> Vec<Hyper> {
        let said = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        said.hypers.range(..=step).next_back().map(|(_, hypers)| hypers.clone()).unwrap_or_default()
    }

    pub(crate) fn drain_after(&self, step: Step) {
        let said = &mut *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        said.drained.insert(step);
        while said.drained.len() > STEPS_KEPT {
            said.drained.pop_first();
        }
    }

    fn drains_after(&self, step: Step) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).drained.contains(&step)
    }
}

impl Settings {
    pub(crate) fn options(&self, interrupt: Interrupt) -> Result<Options, Fault> {
        let spec = JobSpec {
            name: JobName::parse("job", &self.job)?,
            params: self
                .params
                .iter()
                .map(|(name, shape, group)| Param { name: name.clone(), shape: shape.clone(), group: *group })
                .collect(),
            groups: self.groups.clone(),
            rule: self.rule.parse()?,
            gradient_dtype: self.gradient_dtype.parse()?,
            image_dtype: self.image_dtype.parse()?,
            world_size: self.most_ranks(),
            micro_steps: if self.sums_on_worker() { 1 } else { self.accumulate },
            max_delay: self.delay,
            shard_elements: self.shard_elements,
            tier: self.tier.parse()?,
            formats: Formats { state: self.state.parse()?, master: self.master.parse()?, seed: self.seed },
            partitions: self.partitions(),
            leave_out: self.missing_gradients == "skip",
            replicas: self.replicas,
        };
        let deadline = Duration::try_from_secs_f64(self.deadline)
            .map_err(|_| Fault::invalid("deadline", self.deadline, "above 0 seconds", "give seconds"))?;
        let transport = self.transport.parse()?;
        Ok(Options {
            deadline,
            transport,
            interrupt,
            tls_dir: self.tls_dir.clone(),
            world_size: self.world_size,
            ..Options::new(self.servers.clone(), spec, Rank(self.rank))
        })
    }

    fn most_ranks(&self) -> u32 {
        self.max_ranks.unwrap_or(self.world_size)
    }

    /// Returns true if this process adds up the gradients of a step's backward passes.
    fn sums_on_worker(&self) -> bool {
        self.accumulate_on == "worker" && self.accumulate > 1
    }

    fn partitions(&self) -> Vec<Partition> {
        let of_rank = |&(first, rank): &(u32, u32)| Partition { first, ranks: vec![Rank(rank)] };
        let mut partitions: Vec<_> = self.partitions.iter().map(of_rank).collect();
        if let Some(first) = self.frozen_from {
            if partitions.is_empty() {
                partitions.push(Partition::whole(self.most_ranks()));
            }
            partitions.push(Partition::frozen(first));
        }
        partitions
    }

    /// The factor between a loss and the scaler's value. Servers divide a sum by its number of gradients, and so does a
    /// worker that adds them up. Torch adds gradients without a division.
    pub(crate) fn scale_factor(&self) -> f64 {
        f64::from(self.accumulate.max(1))
    }

    fn scaler(&self) -> Result<LossScaler, Fault> {
        let factor = self.scale_factor();
        match &self.loss_scale {
            None => LossScaler::fixed(1.0 / factor),
            Some(given) if !given.dynamic => LossScaler::fixed(given.initial / factor),
            Some(given) => LossScaler::dynamic(LossScalerOptions {
                initial: given.initial / factor,
                window: given.window,
                hysteresis: given.hysteresis,
                consecutive_hysteresis: given.consecutive_hysteresis,
                min: given.min / factor,
            }),
        }
    }

    /// Returns the options of the pipeline. With partitions a rank requests only the weights of its own partitions.
    /// Frozen weights do not change.
    pub(crate) fn pipeline(&self, steps: &StepByStep, spec: &JobSpec) -> Result<PipelineOptions, Fault> {
        let (hypers, drains) = (steps.clone(), steps.clone());
        let scaler = self.scaler()?;
        let schedule = match self.delay {
            0 => Schedule::exact(),
            _ => Schedule::delayed(self.warmup_steps).draining_when(move |step| drains.drains_after(step)),
        };
        let accumulate = match self.sums_on_worker() {
            true => Accumulate::OnWorker { micro_steps: self.accumulate },
            false => Accumulate::OnServers,
        };
        let weights = match spec.partitions.is_empty() {
            true => Weights::Whole,
            false => Weights::Ranges(spec.validate()?.contributed_by(Rank(self.rank)).collect()),
        };
        Ok(PipelineOptions {
            schedule,
            clip: self.max_grad_norm,
            correction: self.correction.parse()?,
            accumulate,
            weights,
            ..PipelineOptions::new(scaler, move |step| hypers.hypers(step))
        })
    }
}
