//! Checkpoints of real jobs: servers in one process, driven as workers would.

mod damage;
mod frozen;
mod round_trip;
mod sealing;
mod training;

use std::{
    path::Path,
    sync::{Arc, Mutex},
};

use longshore_engine::{
    checkpoint::{Part, RestoreInfo, Store},
    job::Job,
    kernels::Isa,
    step::{Admission, Phase},
    tier::Storage,
};
use longshore_proto::{
    ChunkId, Commit, ContributionChunk, Correction, Dtype, Fault, FaultKind, Incarnation, JobName, JobSpec,
    Layout, LeftOut, Rank, Rule, ShardId, TierKind, Version, limits::BLOCK_ELEMENTS,
};

use crate::common::{
    self,
    cluster::{Cluster, compute, soon, upload},
    reference::param_ranges,
    weights,
};

const RANK: Incarnation = Incarnation(1);

/// A model of 5 blocks, in shards of `shard_blocks`.
fn spec(shard_blocks: u64, max_delay: u32) -> JobSpec {
    JobSpec {
        name: run(),
        max_delay,
        shard_elements: shard_blocks * BLOCK_ELEMENTS,
        ..common::spec(&[100_000, 63, 202_500], &[0, 1, 0])
    }
}

/// A job on several servers. Its weights and gradients do not depend on servers and shards. A thread may train the job
/// while another makes checkpoints.
struct Trained {
    cluster: Mutex<Cluster>,
    jobs: Vec<Arc<Job>>,
    layout: Layout,
}

impl Trained {
    fn open(spec: &JobSpec, servers: usize) -> Trained {
        Trained::open_on(spec, servers, &Storage::default())
    }

    fn open_on(spec: &JobSpec, servers: usize, storage: &Storage) -> Trained {
        let mut cluster = Cluster::try_open(spec, servers, &compute(2, Isa::detect()), storage).unwrap();
        cluster.join(0);
        let (jobs, layout) = (cluster.jobs.clone(), cluster.layout.clone());
        Trained { cluster: Mutex::new(cluster), jobs, layout }
    }

    /// Opens a job, gives it weights, and runs `steps` steps.
    fn after(spec: &JobSpec, servers: usize, steps: u64) -> Trained {
        let trained = Trained::open(spec, servers);
        trained.upload();
        (1..=steps).for_each(|step| trained.step(step));
        trained
    }

    fn upload(&self) {
        let cluster = self.cluster.lock().unwrap();
        cluster.upload(&weights(&cluster.spec, 1));
    }

    /// Runs one whole step. Every third step overflows.
    fn step(&self, step: u64) {
        self.step_with(step, step);
    }

    /// Runs a step with the gradients of the step `gradients`.
    fn step_with(&self, step: u64, gradients: u64) {
        let mut cluster = self.cluster.lock().unwrap();
        let spec = cluster.spec.clone();
        let flat = gradient(&spec, gradients);
        for (chunk, payload) in cluster.chunks(step, 0, 0, &flat) {
            let chunk = ContributionChunk { loss_scale: loss_scale(step), ..chunk };
            assert!(matches!(cluster.store(&chunk, payload), Ok(Admission::New(_))));
        }
        cluster.work();
        cluster.commit(&decision(&spec, step)).unwrap();
        cluster.settle().unwrap();
    }

    fn version(&self) -> Version {
        self.jobs[0].progress().version
    }

    fn state_hash(&self) -> String {
        self.cluster.lock().unwrap().hash()
    }

    /// Returns the image of the whole model at one version.
    fn image(&self, version: Version) -> Result<Vec<u8>, Fault> {
        let cluster = self.cluster.lock().unwrap();
        let mut whole = Vec::new();
        for shard in (0..self.layout.shards()).map(ShardId) {
            whole.extend(cluster.image(shard, version.0)?.expect("the version is reached"));
        }
        Ok(whole)
    }

    fn write(&self, store: &Store, name: &str) -> Vec<String> {
        let write = |job| store.write(0, job, name, None, soon()).unwrap().to_json().unwrap();
        self.jobs.iter().map(write).collect()
    }

    fn save(&self, store: &Store, name: &str) {
        let parts = self.write(store, name);
        store.seal(&self.jobs[0].spec().name, name, &parts).unwrap();
    }

    fn restore(&self, store: &Store, name: &str) -> Result<Vec<RestoreInfo>, Fault> {
        self.jobs.iter().map(|job| store.restore(job, &run(), name, soon())).collect()
    }

    fn is_loading(&self) -> bool {
        self.jobs.iter().all(|job| job.progress().phase == Phase::Loading)
    }
}

/// Returns a step's gradient. A parameter that the step leaves out has only -0 as elements.
fn gradient(spec: &JobSpec, step: u64) -> Vec<u8> {
    let mut flat = common::gradient(spec, 100 + step, 0.5);
    for (param, range) in param_ranges(spec).into_iter().enumerate() {
        if spec.leave_out && !is_given(param as u32, step) {
            let bytes = &mut flat[range.start * 2..range.end * 2];
            bytes.chunks_exact_mut(2).for_each(|element| element.copy_from_slice(&[0, 0x80]));
        }
    }
    flat
}

fn decision(spec: &JobSpec, step: u64) -> Commit {
    let skip = step.is_multiple_of(3);
    Commit {
        skip,
        gradient_scale: loss_scale(step),
        clip_coefficient: 0.9,
        // With look-ahead an image differs from the rounded master weights, so a restore must take the image from the
        // checkpoint.
        correction: match spec.max_delay > 0 && spec.rule.can_look_ahead() {
            true => Correction::LookAhead(vec![1e-3; 2]),
            false => Correction::None,
        },
        left_out: if spec.leave_out { left_out(step) } else { Vec::new() },
        norm: if skip { f64::NAN } else { 0.1 * step as f64 },
        loss_scale: loss_scale(step + 1),
        trainer_state: format!("after {step}").into_bytes(),
        ..common::commit(spec, step)
    }
}

/// Returns true if a parameter gets a gradient in a step of a job with `leave_out`.
fn is_given(param: u32, step: u64) -> bool {
    !(param == 1 && step % 2 == 1 || param == 2 && step % 5 == 4)
}

fn left_out(step: u64) -> Vec<LeftOut> {
    let applied: Vec<u64> = (1..=step).filter(|step| !step.is_multiple_of(3)).collect();
    let of = |param| {
        let missed = |step: &&u64| !is_given(param, **step);
        let (steps, now) = (applied.iter().filter(missed).count() as u64, applied.last().filter(missed));
        (steps > 0).then_some(LeftOut { param, steps, now: now.is_some() })
    };
    (0..3).filter_map(of).collect()
}

/// Returns a step's loss scale. After the first step the scale is 1/3, which no decimal text of few digits gives back.
fn loss_scale(step: u64) -> f64 {
    if step == 1 { 1.0 } else { 1.0 / 3.0 }
}

fn run() -> JobName {
    JobName::parse("name", "run").unwrap()
}

fn store() -> (tempfile::TempDir, Store) {
    let root = tempfile::tempdir().unwrap();
    let store = Store::new(root.path());
    (root, store)
}

fn files(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<_> = entries.map(|entry| entry.file_name().into_string().unwrap()).collect();
    names.sort();
    names
}
