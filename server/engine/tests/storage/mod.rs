//! Promise 3 on disk: after any fault of a server or its disks, the job continues from a decided version. If that is
//! impossible, the server names the file and the reason, and changes nothing.

mod crashes;
mod damage;
mod disk;
mod faults;
mod fencing;
mod pauses;
mod reads;
mod removal;
mod spilled;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use longshore_engine::{
    admission::Need,
    job::Compute,
    kernels::Isa,
    tier::{Spill, Storage},
};
use longshore_proto::{Correction, Dtype, Fault, JobSpec, ServerId, TierKind};

use self::disk::{Disks, Image};
use crate::common::{
    self, BLOCK, Dirs,
    cluster::{Cluster, compute, placement},
    commit, gradient,
    reference::Reference,
    spec, weights,
};

/// Returns a job of three shards, of one block each.
fn small(max_delay: u32) -> JobSpec {
    let mut spec = spec(&[5, 2 * BLOCK as u64 + 9], &[0, 1]);
    (spec.tier, spec.max_delay) = (TierKind::Nvme, max_delay);
    (spec.gradient_dtype, spec.image_dtype) = (Dtype::Bf16, Dtype::F16);
    spec
}

impl Dirs {
    /// Returns directories on simulated disks.
    fn on(disks: &Disks, count: usize) -> Dirs {
        let mut dirs = Dirs::new(count);
        dirs.storage.disks = Some(Arc::new(disks.clone()));
        dirs
    }

    /// Returns the storage of a host whose disks hold `image`.
    fn with(&self, image: Image) -> Storage {
        Storage { disks: Some(Arc::new(Disks::with(image))), ..self.storage.clone() }
    }
}

/// Returns a job's need on one server.
fn need(spec: &JobSpec, spill: Spill) -> Need {
    need_on(spec, Storage { spill, ..Storage::default() })
}

fn need_on(spec: &JobSpec, storage: Storage) -> Need {
    let owned = placement(spec, 1).owned(ServerId(0));
    let storage = Storage { dirs: vec!["a".into()], ..storage };
    Need::of(spec, &spec.validate().unwrap(), &owned, &storage)
}

fn host() -> Arc<Compute> {
    compute(1, Isa::detect())
}

fn open(spec: &JobSpec, storage: &Storage) -> Result<Cluster, Fault> {
    Cluster::try_open(spec, 1, &host(), storage)
}

/// Opens a job that this process has just closed. A snapshot's thread may keep the job's folder in use a moment longer.
fn reopen(spec: &JobSpec, storage: &Storage) -> Result<Cluster, Fault> {
    let until = Instant::now() + Duration::from_secs(10);
    loop {
        match open(spec, storage) {
            Err(fault) if fault.value.contains("in use by another process") && Instant::now() < until => {
                std::thread::yield_now();
            }
            opened => return opened,
        }
    }
}

fn started(spec: &JobSpec, storage: &Storage) -> Cluster {
    let mut cluster = open(spec, storage).unwrap();
    cluster.join(0);
    cluster.upload(&weights(spec, 1));
    cluster
}

fn step_of(spec: &JobSpec, step: u64) -> (Vec<Vec<u8>>, longshore_proto::Commit) {
    let mut commit = commit(spec, step);
    commit.skip = step == 2;
    commit.trainer_state = vec![step as u8; 9];
    if spec.max_delay > 0 {
        commit.correction = match step % 2 {
            0 => Correction::None,
            _ => Correction::LookAhead(commit.groups.iter().map(|hyper| hyper.lr / 2.0).collect()),
        };
    }
    (vec![gradient(spec, 100 + step, 1.0)], commit)
}

/// Returns the references after 0, 1, ... `steps` steps.
fn references(spec: &JobSpec, steps: u64) -> Vec<Reference> {
    let mut all = vec![Reference::new(spec, &weights(spec, 1))];
    for step in 1..=steps {
        let mut next = all[step as usize - 1].clone();
        let (flats, commit) = step_of(spec, step);
        next.step(&flats, &commit);
        all.push(next);
    }
    all
}

fn run_steps(cluster: &mut Cluster, steps: std::ops::RangeInclusive<u64>) {
    for step in steps {
        let (flats, commit) = step_of(&cluster.spec.clone(), step);
        cluster.step(&flats, &commit);
    }
    cluster.settle().unwrap();
}

/// Compares the recovered version's state, images and commit. Returns the version.
fn check(cluster: &Cluster, references: &[Reference]) -> u64 {
    let progress = cluster.jobs[0].progress();
    let version = progress.version.0;
    let reference = &references[version as usize];
    assert_eq!(cluster.hash(), reference.hash(), "state of version {version}");
    assert_eq!(progress.applied, reference.applied);
    assert_eq!(progress.last_commit, (version > 0).then(|| step_of(&cluster.spec, version).1));
    let older = version.saturating_sub(u64::from(cluster.spec.max_delay));
    for kept in older..=version {
        for shard in (0..cluster.layout.shards()).map(longshore_proto::ShardId) {
            let image = cluster.image(shard, kept).unwrap().expect("recovered");
            assert_eq!(image, cluster.part(&references[kept as usize].image, shard, 2), "image of {kept}");
        }
    }
    version
}
