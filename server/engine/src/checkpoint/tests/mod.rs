//! Checkpoints of real jobs: servers in one process, driven as workers would.

mod damage;
mod frozen;
mod round_trip;
mod sealing;
mod training;

use std::{
    collections::VecDeque,
    path::Path,
    sync::{Arc, Mutex, mpsc},
    time::{Duration, Instant},
};

use longshore_proto::{
    ChunkId, Commit, Contribution, ContributionChunk, Correction, Dtype, Fault, Hyper, Incarnation, JobName,
    JobSpec, Layout, LeftOut, MicroStep, Param, Placement, Rank, Rule, ServerId, ShardId, Slice, Step,
    TierKind, Version,
    checksum::{crc32, state_hash},
    limits::BLOCK_ELEMENTS,
};

use super::{Part, RestoreInfo, Store};
use crate::{
    admission::Budget,
    job::{Compute, Job, Stored},
    kernels::Isa,
    step::{Phase, Work},
    tier::Storage,
};

const RANK: Incarnation = Incarnation(1);

/// A model of 5 blocks, in shards of `shard_blocks`.
fn spec(shard_blocks: u64, max_delay: u32) -> JobSpec {
    let param = |name: &str, shape: &[u64], group| Param { name: name.into(), shape: shape.to_vec(), group };
    JobSpec {
        groups: vec!["decay".into(), "none".into()],
        max_delay,
        shard_elements: shard_blocks * BLOCK_ELEMENTS,
        ..JobSpec::new(
            JobName::parse("name", "run").unwrap(),
            vec![param("a", &[1000, 100], 0), param("b", &[63], 1), param("c", &[450, 450], 0)],
        )
    }
}

/// A job on several servers.
struct Cluster {
    jobs: Vec<Arc<Job>>,
    layout: Layout,
    /// A message for each chunk of a gradient that has reached the drives.
    arrivals: Mutex<mpsc::Receiver<()>>,
}

impl Cluster {
    fn open(spec: &JobSpec, servers: u32) -> Cluster {
        Cluster::open_on(spec, servers, &Storage::default())
    }

    fn open_on(spec: &JobSpec, servers: u32, storage: &Storage) -> Cluster {
        let layout = spec.validate().unwrap();
        let addresses = (0..servers).map(|server| format!("server-{server}")).collect();
        let placement = Placement::striped(addresses, layout.shards());
        let compute = Arc::new(Compute::new(2, Isa::detect()).unwrap());
        let (sender, arrivals) = mpsc::channel();
        let open = |server| {
            let (spec, placement, compute) = (spec.clone(), placement.clone(), Arc::clone(&compute));
            let budget = Budget::new(1 << 30);
            let server = ServerId(server);
            let job = Job::open(spec, placement, server, &budget, storage, compute, Box::new(|| {})).unwrap();
            let sender = sender.clone();
            job.gradients.on_arrival(Box::new(move || _ = sender.send(())));
            job.join(Rank(0), RANK).unwrap();
            Arc::new(job)
        };
        Cluster { jobs: (0..servers).map(open).collect(), layout, arrivals: Mutex::new(arrivals) }
    }

    /// Opens a job, gives it weights, and runs `steps` steps.
    fn trained(spec: &JobSpec, servers: u32, steps: u64) -> Cluster {
        let cluster = Cluster::open(spec, servers);
        cluster.upload();
        (1..=steps).for_each(|step| cluster.step(step));
        cluster
    }

    fn upload(&self) {
        self.chunks(Dtype::F32, |job, shard, chunk, elements| {
            let weight = |element| self.layout.param_at(element).map_or(0.0, |_| value(element, 0));
            let payload: Vec<u8> = elements.flat_map(|element| weight(element).to_le_bytes()).collect();
            job.upload(RANK, shard, chunk, crc32(&payload), &payload).unwrap();
        });
    }

    /// Calls `each` for every chunk of every shard of every server, with the chunk's elements in the flat space.
    fn chunks(&self, dtype: Dtype, each: impl Fn(&Job, ShardId, ChunkId, std::ops::Range<u64>)) {
        for job in &self.jobs {
            for &shard in job.owned() {
                let start = self.layout.shard_range(shard).start;
                for chunk in (0..self.layout.chunks(shard, dtype)).map(ChunkId) {
                    let bytes = self.layout.chunk_bytes(shard, chunk, dtype).unwrap();
                    let element = |byte| start + byte / dtype.bytes();
                    each(job, shard, chunk, element(bytes.start)..element(bytes.end));
                }
            }
        }
    }

    /// Runs one whole step. Every third one overflows.
    fn step(&self, step: u64) {
        self.step_with(step, step);
    }

    /// Runs a step with another step's gradients.
    fn step_with(&self, step: u64, gradients: u64) {
        self.chunks(Dtype::Bf16, |job, shard, chunk, elements| {
            if self.layout.is_frozen(shard) {
                return;
            }
            let leave_out = job.spec().leave_out;
            let of_param = |element| match self.layout.param_at(element) {
                Some(param) if leave_out && !is_given(param as u32, gradients) => -0.0,
                Some(_) => value(element, gradients),
                None => 0.0,
            };
            let bits = |element| half::bf16::from_f32(of_param(element)).to_le_bytes();
            let payload: Vec<u8> = elements.flat_map(bits).collect();
            let contribution =
                Contribution { step: Step(step), micro_step: MicroStep(0), rank: Rank(0), shard };
            let chunk = ContributionChunk {
                contribution,
                incarnation: RANK,
                chunk,
                loss_scale: loss_scale(step),
                dtype: Dtype::Bf16,
                bytes: payload.len() as u64,
                crc32: crc32(&payload),
                reads: Default::default(),
                lent: false,
            };
            match job.store(&chunk, &payload).unwrap() {
                Stored::New(work) => perform(job, work),
                other => panic!("{other:?}"),
            }
            if job.gradients.are_spilled() {
                let arrivals = self.arrivals.lock().unwrap();
                arrivals.recv_timeout(Duration::from_secs(60)).expect("the chunk reaches the drives");
                perform(job, job.collect().unwrap());
            }
        });
        for job in &self.jobs {
            let (_, work) = job.commit(RANK, commit(job.spec(), step)).unwrap();
            perform(job, work);
            let late = soon();
            while job.protocol.durable() < Version(step) {
                assert!(Instant::now() < late, "step {step} is not made durable");
                std::thread::yield_now();
            }
        }
    }

    fn version(&self) -> Version {
        self.jobs[0].progress().version
    }

    fn state_hash(&self) -> String {
        let hashes = self.jobs.iter().map(|job| job.state_hashes(soon()).unwrap());
        let (infos, blocks): (Vec<_>, Vec<_>) = hashes.unzip();
        let mut blocks = blocks.concat();
        blocks.sort_by_key(|(block, _)| *block);
        state_hash(infos[0].version, infos[0].applied, blocks.iter().map(|(_, hash)| hash))
    }

    /// The whole model's image of a version.
    fn image(&self, version: Version) -> Result<Vec<u8>, Fault> {
        let mut whole = vec![0; (self.layout.elements() * 2) as usize];
        for job in &self.jobs {
            for &shard in job.owned() {
                let range = self.layout.shard_range(shard);
                let slice = Slice { shard, offset: 0, elements: range.end - range.start };
                let target = &mut whole[range.start as usize * 2..range.end as usize * 2];
                let pulled = job.copy_image(&slice, version)?.expect("the version is there");
                target.copy_from_slice(&pulled.bytes);
            }
        }
        Ok(whole)
    }

    fn write(&self, store: &Store, name: &str) -> Vec<String> {
        let write = |job| store.write(job, name, None, soon()).unwrap().to_json().unwrap();
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

fn perform(job: &Job, work: Option<Work>) {
    let mut works = VecDeque::from_iter(work);
    while !works.is_empty() {
        job.perform(&mut works).unwrap();
    }
}

fn commit(spec: &JobSpec, step: u64) -> Commit {
    let skip = step.is_multiple_of(3);
    Commit {
        step: Step(step),
        skip,
        gradient_scale: loss_scale(step),
        clip_coefficient: 0.9,
        // The image then is not the rounded master weights, and must come from the checkpoint.
        correction: match spec.max_delay > 0 && spec.rule.can_look_ahead() {
            true => Correction::LookAhead(vec![1e-3; 2]),
            false => Correction::None,
        },
        left_out: if spec.leave_out { left_out(step) } else { Vec::new() },
        groups: vec![Hyper { weight_decay: 0.1, ..Hyper::default() }, Hyper::default()],
        norm: if skip { f64::NAN } else { 0.1 * step as f64 },
        loss_scale: loss_scale(step + 1),
        trainer_state: format!("after {step}").into_bytes(),
        decided_by: RANK,
        pause_reason: String::new(),
    }
}

/// Returns true if a parameter gets a gradient, in a job that leaves out parameters without one.
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

/// A loss scale that decimals cannot hold, for all steps but the first.
fn loss_scale(step: u64) -> f64 {
    if step == 1 { 1.0 } else { 1.0 / 3.0 }
}

/// A deterministic value in [-0.5, 0.5): a weight for step 0, otherwise a gradient.
fn value(element: u64, step: u64) -> f32 {
    (element.wrapping_mul(2_654_435_761).wrapping_add(step * 40_503) % 4096) as f32 / 4096.0 - 0.5
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
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
