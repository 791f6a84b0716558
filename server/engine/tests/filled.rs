//! A job that is filled with another one's state goes on as that one does, to the bit, on any tier and in any formats.

mod common;

use std::sync::Arc;

use common::{BLOCK, Noise, cluster::Cluster, cluster::compute, commit, gradient, spec, weights};
use longshore_engine::{job::Compute, kernels::Isa, tier::Storage};
use longshore_proto::{
    Dtype, Formats, JobSpec, MasterFormat, Rule, ShardId, StateArray, StateFormat, TierKind,
};
use proptest::prelude::*;

/// A job of four shards, whose parameters lie across their borders.
fn job(rule: Rule, formats: Formats) -> JobSpec {
    let sizes = [7, 2 * BLOCK as u64 + 9, BLOCK as u64 - 3];
    JobSpec { rule, formats, gradient_dtype: Dtype::F32, image_dtype: Dtype::F32, ..spec(&sizes, &[0, 1, 0]) }
}

fn steps(cluster: &mut Cluster, seed: u64, steps: std::ops::RangeInclusive<u64>) {
    for step in steps {
        let spec = cluster.spec.clone();
        cluster.step(&[gradient(&spec, seed + step, 1.0)], &commit(&spec, step));
    }
}

/// The arrays that the rule has, and every element of the newest image.
fn bits(cluster: &Cluster, version: u64) -> (Vec<Vec<u32>>, Vec<u8>) {
    let (state, _) = cluster.exported();
    let shards = (0..cluster.layout.shards()).map(ShardId);
    let image = shards.flat_map(|shard| cluster.image(shard, version).unwrap().unwrap()).collect();
    (state.iter().map(|array| array.iter().map(|value| value.to_bits()).collect()).collect(), image)
}

fn host() -> Arc<Compute> {
    compute(2, Isa::detect())
}

fn rules() -> impl Strategy<Value = Rule> {
    prop::sample::select(&Rule::ALL[..])
}

fn formats() -> impl Strategy<Value = Formats> {
    let state = prop::sample::select(vec![StateFormat::F32, StateFormat::Bf16, StateFormat::Block8]);
    let master = prop::sample::select(vec![MasterFormat::F32, MasterFormat::Bf16]);
    (state, master).prop_map(|(state, master)| Formats { state, master, seed: 3 })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// The gradients that the first job gets as steps 4 to 6 are steps 1 to 3 of the second, which has other servers.
    #[test]
    fn a_filled_job_goes_on_to_the_bit(rule in rules(), formats in formats(), seed in 0u64..1 << 40) {
        let spec = job(rule, formats);
        let mut first = Cluster::open(&spec, 1, &host());
        first.join(0);
        first.upload(&weights(&spec, seed));
        steps(&mut first, seed, 1..=3);
        let (state, applied) = first.exported();
        prop_assert_eq!(applied, 3);
        let mut second = Cluster::open(&JobSpec { shard_elements: 2 * BLOCK as u64, ..spec.clone() }, 2, &host());
        second.join(0);
        second.upload_state(&state, applied);
        prop_assert!(bits(&second, 0) == bits(&first, 3));
        steps(&mut first, seed, 4..=6);
        steps(&mut second, seed + 3, 1..=3);
        prop_assert!(bits(&second, 3) == bits(&first, 6));
        prop_assert_eq!(second.exported().1, 6);
    }
}

/// The order of arrays and shards is nobody's business; and the job starts with the last chunk, whichever that is.
#[test]
fn chunks_of_state_come_in_any_order() {
    let spec = job(Rule::AdamW, Formats::default());
    let values = weights(&spec, 1);
    let squares: Vec<f32> = values.iter().map(|value| value * value).collect();
    let arrays = [&values, &values, &squares].map(|array| common::encode(array, Dtype::F32));
    for seed in 0..8 {
        let mut noise = Noise(seed);
        let mut parts: Vec<(StateArray, u32)> =
            StateArray::ALL.iter().flat_map(|&array| (0..4).map(move |shard| (array, shard))).collect();
        (1..parts.len()).rev().for_each(|end| parts.swap(end, noise.below(end + 1)));
        let mut cluster = Cluster::open(&spec, 1, &host());
        cluster.join(0);
        for (index, &(array, shard)) in parts.iter().enumerate() {
            let loading = !cluster.jobs[0].progress().missing.is_empty();
            assert!(loading, "seed {seed}: started after {index} of {} parts", parts.len());
            cluster.upload_array(array, &arrays[array.index()], ShardId(shard), 5).unwrap();
        }
        assert_eq!(cluster.exported(), (vec![values.clone(), values.clone(), squares.clone()], 5));
    }
}

/// A server that ends in the middle of a filling has forgotten it; one that ends behind it goes on from it.
#[test]
fn a_filled_job_outlives_its_server() {
    let dirs = tempfile::tempdir().unwrap();
    let spec = JobSpec { tier: TierKind::Nvme, ..job(Rule::AdamW, Formats::default()) };
    let storage = Storage { dirs: vec![dirs.path().to_path_buf()], buffers: 2, ..Storage::default() };
    let open = || Cluster::try_open(&spec, 1, &host(), &storage).unwrap();
    let values = weights(&spec, 1);
    let squares: Vec<f32> = values.iter().map(|value| value * value).collect();
    let state = [values.clone(), values, squares];
    let mut cluster = open();
    cluster.join(0);
    let bytes = common::encode(&state[0], Dtype::F32);
    (0..4).for_each(|shard| cluster.upload_array(StateArray::Master, &bytes, ShardId(shard), 9).unwrap());
    drop(cluster);
    let mut cluster = open();
    cluster.join(0);
    assert_eq!(cluster.jobs[0].progress().missing.len(), 4);
    cluster.upload_state(&state, 9);
    cluster.settle().unwrap();
    drop(cluster);
    let cluster = open();
    assert_eq!(cluster.exported(), (state.to_vec(), 9));
    assert_eq!(cluster.jobs[0].progress().applied, 9);
}
