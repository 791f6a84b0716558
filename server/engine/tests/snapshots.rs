//! State hashes asked for while training goes on: each is that of exactly one version, and training's bits stay.

mod common;

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, Sender, channel},
    },
    thread,
    time::{Duration, Instant},
};

use common::{
    BLOCK, Noise,
    cluster::{Cluster, soon},
    commit, encode, gradient,
    reference::Reference,
    spec, weights,
};
use longshore_engine::{
    job::{Captured, Exported, Job, Stored},
    step::Work,
};
use longshore_proto::{
    ContributionChunk, Dtype, Formats, JobSpec, MasterFormat, ShardId, StateFormat, Step, Version,
    checksum::state_hash,
};

const STEPS: u64 = 200;
/// Gradients repeat: 200 different ones would take longer to make than to train on.
const CYCLE: u64 = 5;

fn small(delay: u32) -> JobSpec {
    let mut spec = spec(&[1000, 2 * BLOCK as u64 + 77, 33], &[0, 1, 0]);
    (spec.world_size, spec.max_delay) = (2, delay);
    spec
}

fn gradients(spec: &JobSpec) -> Vec<Vec<Vec<u8>>> {
    let of_step = |step: u64| (0..2).map(|rank| gradient(spec, step * 2 + rank, 1.0)).collect();
    (0..CYCLE).map(of_step).collect()
}

fn decision(spec: &JobSpec, step: u64) -> longshore_proto::Commit {
    longshore_proto::Commit { skip: step.is_multiple_of(7), ..commit(spec, step) }
}

/// A test that fails in one thread must not leave the others waiting for ever.
#[derive(Clone, Copy)]
struct Patience {
    end: Instant,
}

impl Patience {
    fn new() -> Patience {
        Patience { end: soon() }
    }

    fn is_over(self) -> bool {
        Instant::now() > self.end
    }

    fn wait(self) {
        assert!(!self.is_over(), "training stands still");
        thread::yield_now();
    }
}

/// One rank's pushes of all steps, waiting where the server says Busy or that it is too early.
fn push(
    job: &Job,
    chunks: impl Fn(u64) -> Vec<(ContributionChunk, Vec<u8>)>,
    works: &Sender<Work>,
    delay: u64,
) {
    let patience = Patience::new();
    for step in 1..=STEPS {
        while job.progress().version.0 + 1 + delay < step {
            patience.wait();
        }
        for (chunk, payload) in chunks(step) {
            loop {
                match job.store(&chunk, &payload).unwrap() {
                    Stored::New(work) => {
                        work.into_iter().for_each(|work| works.send(work).unwrap());
                        break;
                    }
                    Stored::Busy => patience.wait(),
                    _ => panic!("{chunk:?} was never stored"),
                }
            }
        }
    }
}

fn perform(job: &Job, works: &Receiver<Work>) {
    let mut queue = VecDeque::new();
    while let Ok(work) = works.recv() {
        queue.push_back(work);
        while !queue.is_empty() {
            job.perform(&mut queue).unwrap();
            queue.extend(works.try_iter());
        }
    }
}

fn decide(cluster: &Cluster, works: &Sender<Work>) {
    let (job, patience) = (&cluster.jobs[0], Patience::new());
    for step in 1..=STEPS {
        let complete = |shard| job.figures(ShardId(shard), Step(step)).unwrap().is_some();
        while !(0..cluster.layout.shards()).all(complete) {
            patience.wait();
        }
        let (duplicate, work) = job.commit(cluster.incarnations[0], decision(&cluster.spec, step)).unwrap();
        assert!(!duplicate);
        works.send(work.unwrap()).unwrap();
    }
}

/// Every version's hash seen, by asking again and again.
fn watch(job: &Arc<Job>, done: &AtomicBool, seed: u64) -> BTreeMap<u64, String> {
    let (mut seen, mut noise, patience) = (BTreeMap::new(), Noise(seed), Patience::new());
    while !done.load(Ordering::Acquire) && !patience.is_over() {
        let (info, hashes) = job.state_hashes(soon()).unwrap();
        let hash = state_hash(info.version, info.applied, hashes.iter().map(|(_, hash)| hash));
        let earlier = seen.entry(info.version.0).or_insert(hash.clone());
        assert_eq!(*earlier, hash, "two hashes of version {}", info.version.0);
        thread::sleep(Duration::from_micros(noise.below(500) as u64));
    }
    seen
}

fn train_and_watch(delay: u32) {
    let spec = small(delay);
    let (initial, gradients) = (weights(&spec, 1), gradients(&spec));
    let mut reference = Reference::new(&spec, &initial);
    let mut expected = vec![reference.hash()];
    for step in 1..=STEPS {
        reference.step(&gradients[(step % CYCLE) as usize], &decision(&spec, step));
        expected.push(reference.hash());
    }
    let cluster = Cluster::started(&spec, 1, &initial);
    let job = &cluster.jobs[0];
    let done = AtomicBool::new(false);
    let (works, inbox) = channel();
    let seen = thread::scope(|scope| {
        let watchers = [1, 2].map(|seed| {
            scope.spawn({
                let done = &done;
                move || watch(job, done, seed)
            })
        });
        scope.spawn(move || perform(job, &inbox));
        for rank in 0..2 {
            let (works, cluster, gradients) = (works.clone(), &cluster, &gradients);
            let chunks = move |step: u64| {
                let flat = &gradients[(step % CYCLE) as usize][rank as usize];
                let chunks = cluster.chunks(step, 0, rank, flat).into_iter();
                chunks.map(|(chunk, payload)| (chunk, payload.to_vec())).collect()
            };
            scope.spawn(move || push(job, chunks, &works, delay.into()));
        }
        decide(&cluster, &works);
        job.settle(soon()).unwrap();
        drop(works);
        done.store(true, Ordering::Release);
        watchers.map(|watcher| watcher.join().unwrap())
    });
    for (version, hash) in seen.iter().flatten() {
        assert_eq!(*hash, expected[*version as usize], "version {version}");
    }
    let versions: usize = seen.iter().map(BTreeMap::len).sum();
    assert!(versions > 10, "only {versions} hashes were taken while training");
    assert_eq!(cluster.hash(), expected[STEPS as usize]);
}

#[test]
fn a_hash_is_of_one_version_while_an_exact_job_trains() {
    train_and_watch(0);
}

#[test]
fn a_hash_is_of_one_version_while_a_delayed_job_trains() {
    train_and_watch(1);
}

/// The visitor is held at the first shard while the last one is updated: the update visits that one itself, first.
#[test]
fn an_update_waits_for_the_visit_of_a_slow_snapshot() {
    let mut spec = small(0);
    spec.world_size = 1;
    let (initial, flats) = (weights(&spec, 1), [gradient(&spec, 2, 1.0)]);
    let mut reference = Reference::new(&spec, &initial);
    reference.step(&flats, &commit(&spec, 1));
    let mut cluster = Cluster::started(&spec, 1, &initial);
    cluster.push(1, &flats);
    let job = cluster.jobs[0].clone();
    let last = cluster.layout.shards() as usize - 1;
    let visits = Arc::new(Mutex::new(BTreeMap::new()));
    let ((entered, at_first), (go, held)) = (channel(), channel());
    let held = Mutex::new(held);
    let sink = Arc::clone(&visits);
    let capture = move |owned: usize, captured: Captured<'_>| {
        assert_eq!(
            sink.lock().unwrap().insert(owned, bytemuck::cast_slice(captured.state.arrays[0]).to_vec()),
            None,
            "visited twice"
        );
        if owned == 0 {
            entered.send(()).unwrap();
            held.lock().unwrap().recv_timeout(Duration::from_secs(20)).unwrap();
        }
        Ok(())
    };
    let info = thread::scope(|scope| {
        let visitor = scope.spawn(|| job.snapshot(None, soon(), Box::new(capture)).unwrap());
        at_first.recv_timeout(Duration::from_secs(20)).unwrap();
        let (_, work) = job.commit(cluster.incarnations[0], commit(&spec, 1)).unwrap();
        let out_of_order = Work::Update { owned: last, step: Step(1) };
        job.perform(&mut VecDeque::from([out_of_order])).unwrap();
        go.send(()).unwrap();
        let mut works = VecDeque::from_iter(work);
        while works.front().is_some_and(|&work| work != out_of_order) {
            job.perform(&mut works).unwrap();
        }
        visitor.join().unwrap()
    });
    assert_eq!((info.version, info.applied), (Version(0), 0));
    let visits: Vec<f32> = visits.lock().unwrap().values().flatten().copied().collect();
    assert!(visits == initial, "the snapshot holds more than version 0");
    assert_eq!(cluster.hash(), reference.hash());
}

/// Servers are asked for a version before it is decided, so that all give the same.
#[test]
fn a_snapshot_of_a_version_to_come_waits_for_it() {
    let mut spec = small(0);
    spec.world_size = 1;
    let (initial, flats) = (weights(&spec, 1), [gradient(&spec, 2, 1.0)]);
    let mut reference = Reference::new(&spec, &initial);
    let mut cluster = Cluster::started(&spec, 1, &initial);
    let job = cluster.jobs[0].clone();
    let hashes = Arc::new(Mutex::new(BTreeMap::new()));
    let (entered, first_shard) = channel();
    let capture = {
        let (job, hashes) = (job.clone(), hashes.clone());
        move |_: usize, captured: Captured<'_>| {
            hashes.lock().unwrap().extend(job.hash_blocks(&captured));
            entered.send(()).unwrap();
            Ok(())
        }
    };
    let mut step = |step: u64| {
        cluster.step(&flats, &commit(&spec, step));
        reference.step(&flats, &commit(&spec, step));
        reference.hash()
    };
    let info = thread::scope(|scope| {
        let asked = scope.spawn(|| job.snapshot(Some(Version(2)), soon(), Box::new(capture)).unwrap());
        step(1);
        assert!(first_shard.try_recv().is_err(), "version 1 was visited");
        let expected = step(2);
        first_shard.recv_timeout(Duration::from_secs(20)).unwrap();
        step(3);
        let info = asked.join().unwrap();
        let found = state_hash(info.version, info.applied, hashes.lock().unwrap().values());
        assert_eq!(found, expected);
        info
    });
    assert_eq!((info.version.0, info.applied, info.commit.unwrap().step.0), (2, 2, 2));
    let late = job.snapshot(Some(Version(2)), soon(), Box::new(|_, _| Ok(()))).unwrap_err();
    assert_eq!((late.field.as_str(), late.value.as_str()), ("version", "2"));
    let never = job.snapshot(Some(Version(4)), Instant::now(), Box::new(|_, _| Ok(()))).unwrap_err();
    assert_eq!(never.kind, longshore_proto::FaultKind::Deadline);
}

/// In chunks that end inside a shard, whatever the weights are kept in.
#[test]
fn an_export_is_the_rounded_master_weights() {
    let low = Formats { state: StateFormat::Block8, master: MasterFormat::Bf16, seed: 9 };
    for formats in [Formats::default(), low] {
        let spec =
            JobSpec { formats, shard_elements: 9 * BLOCK as u64, ..spec(&[11 * BLOCK as u64 - 5], &[0]) };
        let (initial, flats) = (weights(&spec, 1), [gradient(&spec, 2, 1.0)]);
        let mut reference = Reference::new(&spec, &initial);
        let mut cluster = Cluster::started(&spec, 1, &initial);
        cluster.step(&flats, &commit(&spec, 1));
        reference.step(&flats, &commit(&spec, 1));
        for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
            let parts = Arc::new(Mutex::new(BTreeMap::new()));
            let sink = parts.clone();
            let keep = move |part: Exported<'_>| {
                let before = sink.lock().unwrap().insert((part.shard, part.offset), part.bytes.to_vec());
                assert_eq!(before, None, "exported twice");
                Ok(())
            };
            cluster.jobs[0].export(Some(Version(1)), dtype, soon(), keep).unwrap();
            let bytes: Vec<u8> = parts.lock().unwrap().values().flatten().copied().collect();
            assert!(bytes == encode(&reference.weights(), dtype), "{formats:?} as {dtype}");
        }
    }
}
