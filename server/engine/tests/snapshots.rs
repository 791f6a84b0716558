//! Snapshots during training. A snapshot has exactly one version, and training keeps its bits. No reader delays
//! training.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        mpsc::{Receiver, Sender, channel},
    },
    thread,
    time::{Duration, Instant},
};

use longshore_engine::{
    admission::{Budget, Need},
    job::{Exported, Job, Piece, Snapshot, SnapshotInfo},
    kernels::Isa,
    tier::Storage,
};
use longshore_proto::{
    Correction, Dtype, Fault, FaultKind, Formats, JobSpec, MasterFormat, Partition, Rank, ShardId,
    StateFormat, TierKind, Version, checksum::state_hash, limits::MAX_EXPORTS_AT_ONCE,
};

use crate::common::{
    BLOCK, Dirs,
    cluster::{Cluster, compute, soon},
    commit, encode, gradient,
    reference::Reference,
    spec, weights,
};

fn small(delay: u32) -> JobSpec {
    let mut spec = spec(&[1000, 2 * BLOCK as u64 + 77, 33], &[0, 1, 0]);
    (spec.world_size, spec.max_delay) = (2, delay);
    spec
}

/// Returns a job of one rank, its first weights, its gradients, and the reference after each of `steps` steps.
fn lone(mut spec: JobSpec, steps: u64) -> (JobSpec, Vec<f32>, Vec<Vec<u8>>, Vec<Reference>) {
    spec.world_size = 1;
    let (initial, flats) = (weights(&spec, 1), vec![gradient(&spec, 2, 1.0)]);
    let mut references = vec![Reference::new(&spec, &initial)];
    for step in 1..=steps {
        let mut next = references.last().unwrap().clone();
        next.step(&flats, &commit(&spec, step));
        references.push(next);
    }
    (spec, initial, flats, references)
}

fn started_on(spec: &JobSpec, storage: &Storage, budget: u64, initial: &[f32]) -> Cluster {
    let compute = compute(2, Isa::detect());
    let mut cluster = Cluster::open_within(&Budget::new(budget), spec, 1, &compute, storage).unwrap();
    cluster.join(0);
    cluster.upload(initial);
    cluster
}

/// A reader that reports its first piece, and takes it only when the test says so.
struct Held {
    weights: BTreeMap<(ShardId, usize), Vec<u8>>,
    entered: Sender<()>,
    word: Receiver<()>,
}

impl Held {
    fn new() -> (Held, Receiver<()>, Sender<()>) {
        let ((entered, has_entered), (go, word)) = (channel(), channel());
        (Held { weights: BTreeMap::new(), entered, word }, has_entered, go)
    }

    fn take(&mut self, piece: &Piece) -> Result<(), Fault> {
        if self.weights.is_empty() {
            self.entered.send(()).unwrap();
            self.word.recv_timeout(2 * SOME_TIME).unwrap();
        }
        let before = self.weights.insert((piece.shard, piece.first), piece.bytes().to_vec());
        assert_eq!(before, None, "delivered twice");
        Ok(())
    }
}

const SOME_TIME: Duration = Duration::from_secs(20);

fn steps_beside_a_held_reader(tier: TierKind, storage: &Storage) {
    let (mut spec, initial, flats, references) = lone(small(0), 3);
    spec.tier = tier;
    let mut cluster = started_on(&spec, storage, 1 << 32, &initial);
    let job = Arc::clone(&cluster.jobs[0]);
    let (mut reader, entered, go) = Held::new();
    let export = job.begin_export(None, Exported::Weights(Dtype::F32)).unwrap();
    let (info, reader) = thread::scope(|scope| {
        let reading = scope.spawn(move || (export.run(soon(), |piece| reader.take(piece)), reader));
        entered.recv_timeout(SOME_TIME).unwrap();
        for step in 1..=3 {
            cluster.step(&flats, &commit(&spec, step));
            // The hash is another snapshot of this job, and does not wait for the export's reader.
            assert_eq!(cluster.hash(), references[step as usize].hash());
        }
        go.send(()).unwrap();
        reading.join().unwrap()
    });
    assert_eq!(info.unwrap().version, Version(0));
    let weights: Vec<u8> = reader.weights.into_values().flatten().collect();
    assert!(weights == encode(&initial, Dtype::F32), "the snapshot holds more than version 0");
    assert_eq!(cluster.hash(), references[3].hash());
}

#[test]
fn a_reader_who_takes_nothing_holds_neither_updates_nor_other_snapshots() {
    for tier in [TierKind::Memory, TierKind::Nvme] {
        steps_beside_a_held_reader(tier, &Dirs::new(1).storage);
    }
}

/// A job of 12 MiB in fp32, in shards of 1 MiB, and the memory that the job alone needs.
fn tight() -> (JobSpec, u64) {
    let mut spec = spec(&[48 * BLOCK as u64], &[0]);
    (spec.world_size, spec.shard_elements) = (1, 4 * BLOCK as u64);
    let layout = spec.validate().unwrap();
    let owned: Vec<ShardId> = (0..layout.shards()).map(ShardId).collect();
    let need = Need::of(&spec, &layout, &owned, &Storage::default()).total();
    (spec, need)
}

/// Makes a step on a server with this much memory, beside a snapshot whose reader takes nothing. Returns the snapshot's
/// result.
fn step_beside_a_stuck_reader(
    memory: u64,
    (spec, initial, flats, references): &(JobSpec, Vec<f32>, Vec<Vec<u8>>, Vec<Reference>),
    begin: impl Fn(&Arc<Job>) -> Snapshot,
) -> Result<SnapshotInfo, Fault> {
    let mut cluster = started_on(spec, &Storage::default(), memory, initial);
    let (mut reader, entered, go) = Held::new();
    let snapshot = begin(&cluster.jobs[0]);
    let ended = thread::scope(|scope| {
        let reading = scope.spawn(move || snapshot.run(soon(), |piece| reader.take(piece)));
        entered.recv_timeout(SOME_TIME).unwrap();
        cluster.step(flats, &commit(spec, 1));
        go.send(()).unwrap();
        reading.join().unwrap()
    });
    assert_eq!(cluster.hash(), references[1].hash());
    ended
}

#[test]
fn a_reader_too_slow_for_the_memory_there_is_is_told_so_and_training_goes_on() {
    let (spec, need) = tight();
    let run = lone(spec, 1);
    let export = |job: &Arc<Job>| job.begin_export(None, Exported::Weights(Dtype::F32)).unwrap();
    let checkpoint = |job: &Arc<Job>| job.begin_checkpoint(None).unwrap().0;
    let slow = [
        ("export.reader", step_beside_a_stuck_reader(need, &run, export)),
        ("checkpoint_dir", step_beside_a_stuck_reader(need, &run, checkpoint)),
    ];
    for (field, ended) in slow {
        let fault = ended.unwrap_err();
        assert_eq!((fault.kind, fault.field.as_str()), (FaultKind::Exhausted, field), "{fault}");
        assert!(fault.value.contains("MiB/s") && fault.limit.contains("MiB more"), "{fault}");
    }
    // With the missing memory added, exports and checkpoints are whole.
    let info = step_beside_a_stuck_reader(need + (4 << 20), &run, export).unwrap();
    assert_eq!(info.version, Version(0));
    let info = step_beside_a_stuck_reader(need + (40 << 20), &run, checkpoint).unwrap();
    assert_eq!(info.version, Version(0));
}

/// Unlike a reader, a disk takes all that it is given. Training waits for the checkpoint's disk, and only for that.
#[test]
fn a_checkpoint_without_memory_is_whole_beside_an_update() {
    let (spec, need) = tight();
    let (spec, initial, flats, references) = lone(spec, 1);
    let mut cluster = started_on(&spec, &Storage::default(), need, &initial);
    let (checkpoint, layout) = cluster.jobs[0].begin_checkpoint(None).unwrap();
    let (entered, has_entered) = channel();
    let mut hashes = BTreeMap::new();
    thread::scope(|scope| {
        let reading = scope.spawn(|| {
            checkpoint.run(soon(), |piece| {
                let _ = entered.send(());
                for (block, bytes) in piece.blocks().enumerate() {
                    let hash = *blake3::hash(layout.cut(bytes, false).whole).as_bytes();
                    assert_eq!(hashes.insert((piece.shard, piece.first + block), hash), None, "twice");
                }
                Ok(())
            })
        });
        has_entered.recv_timeout(SOME_TIME).unwrap();
        cluster.step(&flats, &commit(&spec, 1));
        assert_eq!(reading.join().unwrap().unwrap().version, Version(0));
    });
    assert_eq!(state_hash(Version(0), 0, hashes.values()), references[0].hash());
    assert_eq!(cluster.hash(), references[1].hash());
}

#[test]
fn a_snapshot_keeps_no_job_and_ends_with_it() {
    let (spec, initial, ..) = lone(small(0), 0);
    let cluster = Cluster::started(&spec, 1, &initial);
    let job = Arc::clone(&cluster.jobs[0]);
    let early = || job.begin_export(Some(Version(1000)), Exported::Weights(Dtype::Bf16)).unwrap();
    let (waiting, kept) = (early(), early());
    let ended = waiting.ended();
    let closed = Fault::new(FaultKind::NotFound, "job", "deleted", "open", "open it");
    let fault = thread::scope(|scope| {
        let running = scope.spawn(move || waiting.run(soon(), |_| Ok(())).unwrap_err());
        job.end_snapshots(&closed);
        running.join().unwrap()
    });
    assert_eq!((&fault, ended.fault().as_ref()), (&closed, Some(&closed)));
    assert!(Instant::now() < soon());
    let gone = Arc::downgrade(&job);
    drop((cluster, job));
    assert!(gone.upgrade().is_none(), "the job's memory is kept");
    assert_eq!(kept.run(soon(), |_| Ok(())).unwrap_err(), closed);
}

#[test]
fn as_many_exports_as_are_allowed_and_no_more_are_begun() {
    let (spec, initial, ..) = lone(small(0), 0);
    let cluster = Cluster::started(&spec, 1, &initial);
    let begin = || cluster.jobs[0].begin_export(None, Exported::Weights(Dtype::Bf16));
    let mut running: Vec<_> = (0..MAX_EXPORTS_AT_ONCE).map(|_| begin().unwrap()).collect();
    let fault = begin().err().unwrap();
    assert_eq!((fault.kind, fault.field.as_str()), (FaultKind::Exhausted, "exports"), "{fault}");
    // Exports and checkpoints are counted separately, so a checkpoint may still begin.
    let checkpoint = cluster.jobs[0].begin_checkpoint(None).unwrap();
    assert_eq!(cluster.hash(), Reference::new(&spec, &initial).hash());
    drop((running.pop(), checkpoint));
    begin().unwrap();
}

/// A version may be asked for before its decision, so that all servers give the same one.
#[test]
fn a_snapshot_of_a_version_to_come_waits_for_it() {
    let (spec, initial, flats, references) = lone(small(0), 3);
    let mut cluster = Cluster::started(&spec, 1, &initial);
    let job = cluster.jobs[0].clone();
    let (entered, first_shard) = channel();
    let (snapshot, layout) = job.begin_checkpoint(Some(Version(2))).unwrap();
    let mut step = |step: u64| cluster.step(&flats, &commit(&spec, step));
    let info = thread::scope(|scope| {
        let asked = scope.spawn(move || {
            let mut hashes = BTreeMap::new();
            let info = snapshot.run(soon(), |piece| {
                let _ = entered.send(());
                let hash = |block| *blake3::hash(layout.cut(block, false).whole).as_bytes();
                hashes
                    .extend((piece.first..).map(|block| (piece.shard, block)).zip(piece.blocks().map(hash)));
                Ok(())
            });
            (info.unwrap(), hashes)
        });
        step(1);
        assert!(first_shard.try_recv().is_err(), "version 1 was copied");
        step(2);
        step(3);
        let (info, hashes) = asked.join().unwrap();
        let found = state_hash(info.version, info.applied, hashes.values());
        assert_eq!(found, references[2].hash());
        info
    });
    assert_eq!((info.version.0, info.applied, info.commit.unwrap().step.0), (2, 2, 2));
    let late = job.begin_export(Some(Version(2)), Exported::Weights(Dtype::F32)).err().unwrap();
    assert_eq!((late.field.as_str(), late.value.as_str()), ("version", "2"));
    let never = job.begin_export(Some(Version(4)), Exported::Weights(Dtype::F32)).unwrap();
    assert_eq!(never.run(Instant::now(), |_| Ok(())).unwrap_err().kind, FaultKind::Deadline);
    let never = job.begin_export(Some(Version(4)), Exported::Weights(Dtype::F32)).unwrap();
    job.protocol.leave(Rank(0), cluster.incarnations[0]).unwrap();
    let fault = never.run(soon(), |_| Ok(())).unwrap_err();
    assert_eq!((fault.kind, fault.field.as_str()), (FaultKind::Precondition, "version"), "{fault}");
}

/// Pieces of an export end inside a shard, in every format of the weights. Images that look ahead differ from the
/// rounded weights, so an export must not use them.
#[test]
fn an_export_is_the_rounded_master_weights() {
    let low = Formats { state: StateFormat::Block8, master: MasterFormat::Bf16, seed: 9 };
    let adapter = vec![Partition::whole(1), Partition::frozen(1)];
    for (formats, partitions) in [(Formats::default(), vec![]), (low, vec![]), (Formats::default(), adapter)]
    {
        let sizes = [11 * BLOCK as u64 - 5, 3 * BLOCK as u64];
        let shard_elements = 9 * BLOCK as u64;
        let spec = JobSpec { formats, partitions, shard_elements, max_delay: 1, ..spec(&sizes, &[0, 0]) };
        let (initial, flats) = (weights(&spec, 1), [gradient(&spec, 2, 1.0)]);
        let mut reference = Reference::new(&spec, &initial);
        let mut cluster = Cluster::started(&spec, 1, &initial);
        let mut commit = commit(&spec, 1);
        commit.correction = Correction::LookAhead(commit.groups.iter().map(|hyper| hyper.lr).collect());
        cluster.step(&flats, &commit);
        reference.step(&flats, &commit);
        let image = encode(&reference.weights(), spec.image_dtype);
        assert!(reference.image != image, "the images do not look ahead");
        for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
            let mut parts = BTreeMap::new();
            let keep = |part: &Piece| {
                let before = parts.insert((part.shard, part.first), part.bytes().to_vec());
                assert_eq!(before, None, "exported twice");
                Ok(())
            };
            cluster.jobs[0]
                .begin_export(Some(Version(1)), Exported::Weights(dtype))
                .unwrap()
                .run(soon(), keep)
                .unwrap();
            let bytes: Vec<u8> = parts.into_values().flatten().collect();
            assert!(bytes == encode(&reference.weights(), dtype), "{formats:?} as {dtype}");
        }
    }
}
