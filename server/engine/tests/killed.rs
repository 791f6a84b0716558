//! Promise 3 for tier `shm`: a real process is killed at random instants. The next process has the bits of an
//! undisturbed run.

use std::{env, fs, path::Path, thread, time::Duration};

use longshore_engine::{ids::OwnedShard, kernels::Isa, step::Work, tier::Storage};
use longshore_proto::{Commit, Correction, Dtype, Formats, JobSpec, MasterFormat, StateFormat, TierKind};

use crate::common::{
    BLOCK, Noise,
    cluster::{Cluster, compute},
    commit, gradient,
    reference::Reference,
    run_and_kill, spec, weights,
};

const CHILD: &str = "LONGSHORE_TEST_KILLED_IN";
/// Number of kills of each job.
const KILLS: usize = 12;
const EXACT: &str = "exact";
const DELAYED: &str = "delayed";
/// A delayed job with state in fewer bits.
const LOW: &str = "low";

/// A job of four blocks in shards of two. A kill may fall between the blocks of a shard, and between shards.
fn job(name: &str) -> JobSpec {
    let max_delay = u32::from(name != EXACT);
    let mut spec = spec(&[3 * BLOCK as u64 + 7], &[0]);
    spec.shard_elements = 2 * BLOCK as u64;
    (spec.tier, spec.max_delay, spec.image_dtype) = (TierKind::Shm, max_delay, Dtype::F16);
    if name == LOW {
        spec.formats = Formats { state: StateFormat::Block8, master: MasterFormat::Bf16, seed: 3 };
    }
    spec
}

fn decision(spec: &JobSpec, step: u64) -> Commit {
    let mut commit = commit(spec, step);
    commit.skip = step.is_multiple_of(5);
    if spec.max_delay > 0 {
        commit.correction = Correction::LookAhead(commit.groups.iter().map(|hyper| hyper.lr / 2.0).collect());
    }
    commit
}

/// Returns eight gradients, which steps use in turn. The parent can make them once, and so keeps up with the child.
fn gradients(spec: &JobSpec) -> Vec<Vec<Vec<u8>>> {
    (0..8).map(|turn| vec![gradient(spec, turn, 1.0)]).collect()
}

fn open(dir: &Path) -> Cluster {
    let name = dir.file_name().and_then(|name| name.to_str()).unwrap();
    let storage = Storage { shm_dir: Some(dir.to_path_buf()), ..Storage::default() };
    let mut cluster = Cluster::try_open(&job(name), 1, &compute(2, Isa::detect()), &storage).unwrap();
    cluster.join(0);
    cluster
}

#[test]
#[ignore = "the process that other tests start and kill"]
fn child() {
    let dir = env::var(CHILD).expect("a folder, from the test that starts this one");
    let mut cluster = open(Path::new(&dir));
    cluster.work();
    let spec = cluster.spec.clone();
    let from = cluster.jobs[0].progress().version.0;
    let flats = gradients(&spec);
    fs::write(Path::new(&dir).join("ready"), b"").unwrap();
    for step in from + 1..from + 2000 {
        cluster.step(&flats[step as usize % 8], &decision(&spec, step));
    }
    // The parent kills this process long before the sleep ends.
    thread::sleep(Duration::from_secs(60));
}

#[test]
fn a_killed_process_leaves_a_state_to_go_on_from() {
    let root = tempfile::tempdir_in("/dev/shm").unwrap();
    for (index, name) in [EXACT, DELAYED, LOW].into_iter().enumerate() {
        let dir = root.path().join(name);
        fs::create_dir(&dir).unwrap();
        let spec = job(name);
        open(&dir).upload(&weights(&spec, 1));
        let flats = gradients(&spec);
        let mut reference = Reference::new(&spec, &weights(&spec, 1));
        let mut noise = Noise(index as u64);
        let (mut unfinished, mut behind_first) = (0, 0);
        for _ in 0..KILLS {
            let after = Duration::from_micros(5_000 + noise.next() % 8_000);
            run_and_kill("killed::child", CHILD, &dir, after);
            let mut cluster = open(&dir);
            let version = cluster.jobs[0].progress().version.0;
            unfinished += usize::from(!cluster.works[0].is_empty());
            let second = |work: &Work| matches!(work, Work::Update { owned: OwnedShard(1), .. });
            behind_first += usize::from(cluster.works[0].iter().any(second));
            cluster.work();
            while reference.version < version {
                let step = reference.version + 1;
                reference.step(&flats[step as usize % 8], &decision(&spec, step));
            }
            assert_eq!(cluster.hash(), reference.hash(), "version {version}");
            for shard in [0, 1].map(longshore_proto::ShardId) {
                let image = cluster.image(shard, version).unwrap().unwrap();
                assert!(image == cluster.part(&reference.image, shard, 2), "image of {version}");
            }
        }
        println!(
            "{name}: {version} steps, {unfinished} kills inside an update, {behind_first} behind its first shard",
            version = reference.version
        );
        assert!(reference.version > 0 && unfinished > 0, "the kills must fall into training");
    }
}
