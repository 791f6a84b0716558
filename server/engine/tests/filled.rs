//! A job filled with another job's state continues to the same bits, on any tier and in any format.
//! Parameters may each have their own count of updates.

use std::sync::Arc;

use longshore_engine::{job::Compute, kernels::Isa};
use longshore_proto::{
    Commit, Dtype, Formats, JobSpec, LeftOut, MasterFormat, Rule, ShardId, StateArray, StateFormat, TierKind,
    left_out::advance,
};
use proptest::prelude::*;

use crate::common::{
    self, BLOCK, Dirs, Noise, cases, cluster::Cluster, cluster::compute, commit, gradient, spec, weights,
};

/// A job of four shards, whose borders lie inside parameters.
fn job(rule: Rule, formats: Formats) -> JobSpec {
    let sizes = [7, 2 * BLOCK as u64 + 9, BLOCK as u64 - 3];
    JobSpec { rule, formats, gradient_dtype: Dtype::F32, image_dtype: Dtype::F32, ..spec(&sizes, &[0, 1, 0]) }
}

fn steps(cluster: &mut Cluster, seed: u64, steps: std::ops::RangeInclusive<u64>) {
    for step in steps {
        let spec = cluster.spec.clone();
        let without = without(&spec, seed + step);
        let mut gradient = gradient(&spec, seed + step, 1.0);
        for &param in &without {
            let range = cluster.layout.param_range(param as usize);
            let bytes = &mut gradient[range.start as usize * 4..range.end as usize * 4];
            bytes.chunks_exact_mut(4).for_each(|element| element.copy_from_slice(&(-0f32).to_le_bytes()));
        }
        let left_out = advance(&counts(cluster), &without, false);
        cluster.step(&[gradient], &Commit { left_out, ..commit(&spec, step) });
    }
}

/// Returns the parameters without a gradient, if the job has `leave_out`.
fn without(spec: &JobSpec, seed: u64) -> Vec<u32> {
    let mut noise = Noise(seed);
    (0..spec.params.len() as u32).filter(|_| noise.one_in(2) && spec.leave_out).collect()
}

/// Returns the parameters that have fewer updates than the job, as rank 0 learns them.
fn counts(cluster: &Cluster) -> Vec<LeftOut> {
    let progress = cluster.jobs[0].progress();
    progress.last_commit.map_or(progress.left_out, |commit| commit.left_out)
}

/// Returns the rule's arrays as bits, and the newest image.
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
    #![proptest_config(ProptestConfig { cases: cases(12), ..ProptestConfig::default() })]

    /// Steps 4 to 6 of the first job have the gradients of steps 1 to 3 of the second. The second job is on other
    /// servers.
    #[test]
    fn a_filled_job_goes_on_to_the_bit(rule in rules(), formats in formats(), seed in 0u64..1 << 40) {
        let leave_out = formats.state != StateFormat::Block8;
        let spec = JobSpec { leave_out, ..job(rule, formats) };
        let mut first = Cluster::open(&spec, 1, &host());
        first.join(0);
        first.upload(&weights(&spec, seed));
        steps(&mut first, seed, 1..=3);
        let (state, applied) = first.exported();
        prop_assert_eq!(applied, 3);
        let mut second = Cluster::open(&JobSpec { shard_elements: 2 * BLOCK as u64, ..spec.clone() }, 2, &host());
        second.join(0);
        // An uploaded count does not say which step a parameter missed, so `now` is false.
        let lacks: Vec<LeftOut> = counts(&first).iter().map(|lacks| LeftOut { now: false, ..*lacks }).collect();
        second.upload_state(&state, applied, &lacks);
        prop_assert_eq!(counts(&second), lacks);
        prop_assert!(bits(&second, 0) == bits(&first, 3));
        steps(&mut first, seed, 4..=6);
        steps(&mut second, seed + 3, 1..=3);
        prop_assert!(bits(&second, 3) == bits(&first, 6));
        prop_assert_eq!(second.exported().1, 6);
        prop_assert_eq!(counts(&second), counts(&first));
    }
}

/// Arrays and shards may come in any order, and the job starts with the last chunk.
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
            cluster.upload_array(array, &arrays[array.index()], ShardId(shard), (5, &[])).unwrap();
        }
        assert_eq!(cluster.exported(), (vec![values.clone(), values.clone(), squares.clone()], 5));
    }
}

/// The job has 7 updates. Parameter 0 lacks 3 of them, and parameter 2 all.
const UNEVEN: [LeftOut; 2] =
    [LeftOut { param: 0, steps: 3, now: false }, LeftOut { param: 2, steps: 7, now: false }];

/// Each parameter continues as in a job whose parameters all have its number of updates. A restart of the server before
/// the first step changes nothing.
#[test]
fn each_parameter_goes_on_from_its_own_count() {
    for rule in Rule::ALL {
        for tier in TierKind::ALL {
            let spec = JobSpec { tier, ..job(rule, Formats::default()) };
            let dirs = Dirs::new(1);
            let positive: Vec<f32> = weights(&spec, 5).iter().map(|value| value.abs()).collect();
            let state = vec![positive; 3];
            let mut uneven = Cluster::try_open(&spec, 2, &host(), &dirs.storage).unwrap();
            uneven.join(0);
            uneven.upload_state(&state, 7, &UNEVEN);
            if tier.properties().survives_restart() {
                drop(uneven);
                uneven = Cluster::try_open(&spec, 2, &host(), &dirs.storage).unwrap();
                uneven.join(0);
            }
            for job in &uneven.jobs {
                let progress = job.progress();
                assert_eq!((progress.applied, &*progress.left_out), (7, &UNEVEN[..]), "{tier}");
                let refused = job.begin_checkpoint(None).err().expect("it would lose the counts");
                assert_eq!(refused.field, "version", "{refused}");
            }
            let wrong = commit(&spec, 1);
            uneven.push(1, &[gradient(&spec, 6, 1.0)]);
            assert_eq!(uneven.commit(&wrong).unwrap_err().field, "commit.left_out", "{rule:?}");
            uneven.commit(&Commit { left_out: UNEVEN.to_vec(), ..wrong }).unwrap();
            uneven.work();
            assert!(uneven.jobs[0].progress().left_out.is_empty(), "the commit says it");
            let second = Commit { left_out: UNEVEN.to_vec(), ..commit(&spec, 2) };
            uneven.step(&[gradient(&spec, 7, 1.0)], &second);
            let found = uneven.exported().0;
            for (param, updates) in [(0, 4), (1, 7), (2, 0)] {
                let spec = JobSpec { tier: TierKind::Memory, ..spec.clone() };
                let mut even = Cluster::open(&spec, 1, &host());
                even.join(0);
                // No upload may name 0 updates. For a parameter with none, the job names one update, and all parameters
                // lack that.
                let of_all: Vec<LeftOut> =
                    (0..3).map(|param| LeftOut { param, steps: 1, now: false }).collect();
                let left_out = if updates == 0 { &of_all[..] } else { &[] };
                even.upload_state(&state, updates.max(1), left_out);
                for step in 1..=2 {
                    let decided = Commit { left_out: left_out.to_vec(), ..commit(&spec, step) };
                    even.step(&[gradient(&spec, 5 + step, 1.0)], &decided);
                }
                let range = even.layout.param_range(param);
                let range = range.start as usize..range.end as usize;
                for (found, expected) in found.iter().zip(even.exported().0) {
                    assert!(
                        found[range.clone()] == expected[range.clone()],
                        "{rule:?}, {tier}, parameter {param}"
                    );
                }
            }
        }
    }
}
