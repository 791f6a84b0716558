//! Weights that servers make by themselves: the same bits whatever the servers, shards, tiers and threads, beside those that
//! rank 0 uploads, and after a server that ended in the middle.

use std::thread;

use longshore_engine::{kernels::Isa, tier::Storage};
use longshore_proto::{
    ChunkId, Dtype, FaultKind, Formats, Incarnation, InitialWeights, Initialisation, JobSpec, MasterFormat,
    Partition, Rank, ShardId, TierKind, Version, checksum::crc32,
};
use proptest::prelude::*;

use crate::common::{
    self, BLOCK, Noise, cluster::Cluster, cluster::compute, commit, gradient, spec, weights,
};

const NORMAL: InitialWeights = InitialWeights::Normal { mean: 0.0, std: 0.02 };

fn kinds() -> impl Strategy<Value = InitialWeights> {
    prop_oneof![
        Just(InitialWeights::Uploaded),
        Just(InitialWeights::Constant(1.0)),
        Just(InitialWeights::Uniform { low: -0.25, high: 0.5 }),
        Just(NORMAL),
        Just(InitialWeights::TruncatedNormal { mean: 0.1, std: 0.02, low: 0.06, high: 0.11 }),
    ]
}

fn sizes() -> impl Strategy<Value = Vec<u64>> {
    prop::collection::vec(prop_oneof![1u64..200, 1..3 * BLOCK as u64], 1..6)
}

fn job(sizes: &[u64], master: MasterFormat) -> JobSpec {
    let formats = Formats { master, seed: 3, ..Formats::default() };
    JobSpec { formats, image_dtype: Dtype::Bf16, ..spec(sizes, &vec![0; sizes.len()]) }
}

fn make(cluster: &Cluster, initialisation: &Initialisation) {
    for job in &cluster.jobs {
        job.make_weights(cluster.incarnations[0], initialisation.clone()).unwrap();
    }
}

/// Uploads the chunks that have an element of an uploaded parameter, with zeros for all others.
fn upload_rest(cluster: &Cluster, initialisation: &Initialisation, weights: &[f32]) {
    let mut rest = vec![0.0; weights.len()];
    let uploaded = |&param: &usize| initialisation.of(param) == InitialWeights::Uploaded;
    for param in (0..cluster.spec.params.len()).filter(uploaded) {
        let range = cluster.layout.param_range(param);
        let range = range.start as usize..range.end as usize;
        rest[range.clone()].copy_from_slice(&weights[range]);
    }
    for shard in (0..cluster.layout.shards()).map(ShardId) {
        for chunk in (0..cluster.layout.chunks(shard, Dtype::F32)).map(ChunkId) {
            let start = cluster.layout.shard_range(shard).start;
            let bytes = cluster.layout.chunk_bytes(shard, chunk, Dtype::F32).unwrap();
            let flat = start + bytes.start / 4..start + bytes.end / 4;
            if cluster.layout.params_in(flat.clone()).any(|param| uploaded(&param)) {
                let payload = common::encode(&rest[flat.start as usize..flat.end as usize], Dtype::F32);
                let job = &cluster.jobs[cluster.owner(shard)];
                job.upload(cluster.incarnations[0], shard, chunk, crc32(&payload), &payload).unwrap();
            }
        }
    }
}

/// Room for every tier, and what removes it.
fn storage() -> ([tempfile::TempDir; 2], Storage) {
    let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir_in("/dev/shm").unwrap()];
    let [disk, shm] = [0, 1].map(|index: usize| dirs[index].path().to_path_buf());
    (dirs, Storage { dirs: vec![disk], shm_dir: Some(shm), buffers: 2, ..Storage::default() })
}

/// The master weights of the flat space, and every image of version 0.
fn bits(cluster: &Cluster) -> (Vec<u32>, Vec<u8>) {
    let (state, applied) = cluster.exported();
    assert_eq!(applied, 0);
    assert!(state[1..].iter().flatten().all(|&moment| moment == 0.0));
    let shards = (0..cluster.layout.shards()).map(ShardId);
    let image = shards.flat_map(|shard| cluster.image(shard, 0).unwrap().unwrap()).collect();
    (state[0].iter().map(|value| value.to_bits()).collect(), image)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn what_is_made_does_not_depend_on_where(
        sizes in sizes(),
        kinds in prop::collection::vec(kinds(), 6),
        seed: u64,
        tier in prop::sample::select(vec![TierKind::Memory, TierKind::Shm, TierKind::Nvme]),
        master in prop::sample::select(vec![MasterFormat::F32, MasterFormat::Bf16]),
        threads in 1usize..4,
        isa in prop::sample::select(Isa::available()),
    ) {
        let initialisation = Initialisation::by_param(seed, kinds[..sizes.len()].to_vec());
        let spec = job(&sizes, master);
        let given = weights(&spec, seed);
        let mut one = Cluster::open(&spec, 1, &compute(2, Isa::detect()));
        one.join(0);
        make(&one, &initialisation);
        upload_rest(&one, &initialisation, &given);
        let made = bits(&one);

        let (_dirs, storage) = storage();
        let larger = JobSpec { tier, shard_elements: 2 * BLOCK as u64, ..spec.clone() };
        let servers = (larger.validate().unwrap().shards() as usize).min(3);
        let mut other = Cluster::try_open(&larger, servers, &compute(threads, isa), &storage).unwrap();
        other.join(0);
        make(&other, &initialisation);
        upload_rest(&other, &initialisation, &given);
        prop_assert!(bits(&other) == made);

        // They are what the same weights are when they are uploaded, and uploaded parameters are what was given.
        let (state, _) = one.exported();
        let mut uploaded = Cluster::open(&spec, 1, &compute(2, Isa::detect()));
        uploaded.join(0);
        uploaded.upload(&state[0]);
        prop_assert!(bits(&uploaded) == made);
        for param in 0..sizes.len() {
            let range = one.layout.param_range(param);
            let range = range.start as usize..range.end as usize;
            match initialisation.of(param) {
                InitialWeights::Uploaded if master == MasterFormat::F32 => {
                    prop_assert_eq!(&state[0][range.clone()], &given[range]);
                }
                InitialWeights::Constant(value) => {
                    prop_assert!(state[0][range].iter().all(|&weight| f64::from(weight) == value));
                }
                _ => {}
            }
        }
    }
}

/// A job whose weights were made trains as one whose weights were uploaded.
#[test]
fn a_made_job_trains() {
    let spec = job(&[3 * BLOCK as u64 + 5, 70], MasterFormat::F32);
    let initialisation = Initialisation::by_param(4, [NORMAL, InitialWeights::Constant(1.0)]);
    let mut made = Cluster::open(&spec, 3, &compute(2, Isa::detect()));
    made.join(0);
    make(&made, &initialisation);
    let (state, _) = made.exported();
    let mut uploaded = Cluster::started(&spec, 1, &state[0]);
    for step in 1..=3 {
        for cluster in [&mut made, &mut uploaded] {
            cluster.step(&[gradient(&spec, step, 1.0)], &commit(&spec, step));
        }
    }
    assert_eq!(made.hash(), uploaded.hash());
    let again = made.jobs[0].make_weights(made.incarnations[0], initialisation);
    again.expect("a repeated request changes nothing");
    assert_eq!(made.hash(), uploaded.hash());
}

/// Requests that overlap share the work, and one of them starts the job.
#[test]
fn requests_at_once_share_the_work() {
    let spec = JobSpec { shard_elements: 64 * BLOCK as u64, ..job(&[150 * BLOCK as u64], MasterFormat::F32) };
    let initialisation = Initialisation::by_param(5, [NORMAL]);
    let mut one = Cluster::open(&spec, 1, &compute(1, Isa::detect()));
    one.join(0);
    make(&one, &initialisation);
    let mut cluster = Cluster::open(&spec, 1, &compute(2, Isa::detect()));
    cluster.join(0);
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| make(&cluster, &initialisation));
        }
    });
    assert!(bits(&cluster) == bits(&one));
}

/// Weights are compared as they are kept: in fewer bits, or as the images of frozen parameters.
#[test]
fn a_full_job_knows_weights_in_fewer_bits() {
    for image in [Dtype::Bf16, Dtype::F16] {
        let spec = job(&[2 * BLOCK as u64 + 9, BLOCK as u64], MasterFormat::Bf16);
        let partitions = vec![Partition { first: 0, ranks: vec![Rank(0)] }, Partition::frozen(1)];
        let spec = JobSpec { partitions, image_dtype: image, ..spec };
        let made = Initialisation::by_param(6, [NORMAL, NORMAL]);
        let mut source = Cluster::open(&spec, 1, &compute(2, Isa::detect()));
        source.join(0);
        make(&source, &made);
        // The same weights, uploaded: nothing says what they were made from.
        let mut cluster = Cluster::open(&spec, 1, &compute(2, Isa::detect()));
        cluster.join(0);
        cluster.upload(&source.exported().0[0]);
        let with = |initialisation: Initialisation| {
            cluster.jobs[0].make_weights(cluster.incarnations[0], initialisation).map_err(|fault| fault.field)
        };
        assert_eq!(with(made.clone()), Ok(()), "{image}");
        for params in [[0.02, 0.03], [0.03, 0.02]] {
            let kinds = params.map(|std| InitialWeights::Normal { mean: 0.0, std });
            assert_eq!(with(Initialisation::by_param(6, kinds)), Err("initialisation".into()), "{image}");
        }
    }
}

/// A job that is deleted, or opened anew, is closed. A request that comes then must not bring its load back to life.
#[test]
fn a_closed_job_makes_nothing() {
    let spec = job(&[3 * BLOCK as u64], MasterFormat::F32);
    let mut cluster = Cluster::open(&spec, 1, &compute(1, Isa::detect()));
    cluster.join(0);
    let job = &cluster.jobs[0];
    job.close_load();
    let fault = job.make_weights(Incarnation(1), Initialisation::by_param(5, [NORMAL])).unwrap_err();
    assert_eq!((fault.kind, &*fault.field), (FaultKind::Unavailable, "job"), "{fault}");
    let missing = job.progress().missing;
    assert_eq!(missing.len(), cluster.layout.shards() as usize);
}

/// A server that ends before the job has started has forgotten what it made, and makes the same again.
#[test]
fn what_a_server_forgets_it_makes_again() {
    let mut noise = Noise(7);
    for tier in [TierKind::Shm, TierKind::Nvme] {
        let (_dirs, storage) = storage();
        let spec = JobSpec { tier, ..job(&[2 * BLOCK as u64 + 9, 7, 5 * BLOCK as u64], MasterFormat::F32) };
        let initialisation =
            Initialisation::by_param(noise.next(), [NORMAL, InitialWeights::Uploaded, NORMAL]);
        let given = weights(&spec, 1);
        let open = || {
            let mut cluster = Cluster::try_open(&spec, 1, &compute(2, Isa::detect()), &storage).unwrap();
            cluster.join(0);
            cluster
        };
        let begun = open();
        make(&begun, &initialisation);
        assert_eq!(
            begun.jobs[0].progress().missing.len(),
            1,
            "{tier}: the shard with the uploaded parameter"
        );
        drop(begun);
        let mut cluster = open();
        assert!(cluster.jobs[0].progress().missing.len() > 1, "{tier}");
        make(&cluster, &initialisation);
        upload_rest(&cluster, &initialisation, &given);
        let made = bits(&cluster);
        cluster.settle().unwrap();
        drop(cluster);
        let kept = open();
        assert_eq!(kept.jobs[0].progress().version, Version(0));
        assert!(kept.jobs[0].progress().missing.is_empty(), "{tier}");
        assert!(bits(&kept) == made, "{tier}");
        let mut undisturbed =
            Cluster::open(&JobSpec { tier: TierKind::Memory, ..spec.clone() }, 1, &compute(1, Isa::detect()));
        undisturbed.join(0);
        make(&undisturbed, &initialisation);
        upload_rest(&undisturbed, &initialisation, &given);
        assert!(bits(&undisturbed) == made, "{tier}");
        assert!(kept.incarnations[0] > Incarnation(1));
        // The process that made them is gone, and this one still tells them from others.
        let with = |initialisation: Initialisation| {
            kept.jobs[0].make_weights(kept.incarnations[0], initialisation).map_err(|fault| fault.field)
        };
        let other_seed = Initialisation { seed: initialisation.seed ^ 1, ..initialisation.clone() };
        let other_kind =
            Initialisation::by_param(initialisation.seed, [NORMAL, InitialWeights::Constant(0.0), NORMAL]);
        assert_eq!(with(initialisation.clone()), Ok(()), "{tier}");
        for other in [other_seed, other_kind] {
            assert_eq!(with(other), Err("initialisation".to_string()), "{tier}");
        }
        assert!(bits(&kept) == made, "{tier}");
    }
}
