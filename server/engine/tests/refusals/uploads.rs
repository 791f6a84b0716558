//! First weights and state that a server must not take.

use std::thread;

use longshore_engine::{job::UploadChunk, kernels::Isa};
use longshore_proto::{
    ChunkId, FaultKind, Incarnation, LeftOut, Rank, Rule, ShardId, StateArray, checksum::crc32,
};

use super::{
    Cluster, Expected, Reference, check, commit, common::cluster, encode_f32, gradient, small, weights,
};

use FaultKind::{Conflict, Fenced, Invalid, NotFound, Precondition};

type Case = (u64, u32, u32, usize, Expected);

/// Each case has incarnation, shard, chunk, the payload's length, and the expected fault.
const CASES: &[Case] = &[
    (0, 0, 1, 1 << 18, (Fenced, "incarnation", &["incarnation is 0", "only rank 0"])),
    (1, 1, 0, 1 << 20, (NotFound, "shard", &["shard is 1", "of 3 in the job"])),
    (1, 9, 0, 1 << 20, (NotFound, "shard", &["shard is 9"])),
    (1, 0, 2, 1 << 20, (Invalid, "chunk", &["chunk is 2", "below 2, the chunks of shard 0"])),
    (1, 0, u32::MAX, 4, (Invalid, "chunk", &["below 2"])),
    (1, 0, 0, (1 << 20) - 4, (Invalid, "payload", &["1048572 bytes", "1048576 bytes"])),
    (1, 0, 1, 1 << 20, (Invalid, "payload", &["1048576 bytes", "262144 bytes"])),
];

#[test]
fn bad_uploads_are_refused_and_change_nothing() {
    let spec = small();
    let mut cluster = Cluster::open(&spec, 2, &cluster::compute(1, Isa::detect()));
    let initial = weights(&spec, 1);
    let bytes = encode_f32(&initial);
    let job = cluster.jobs[0].clone();
    let first = &bytes[..1 << 20];
    let upload = |payload: &[u8]| cluster::upload(&job, Incarnation(1), (ShardId(0), ChunkId(0)), payload);
    check(&upload(first).unwrap_err(), (Precondition, "rank", &["rank is 0", "joined"]));
    cluster.join(0);
    for &(incarnation, shard, chunk, length, expected) in CASES {
        let payload = vec![7; length];
        let result =
            cluster::upload(&job, Incarnation(incarnation), (ShardId(shard), ChunkId(chunk)), &payload);
        check(&result.unwrap_err(), expected);
    }
    upload(first).unwrap();
    upload(first).unwrap();
    let other = vec![7; 1 << 20];
    let fault = upload(&other).unwrap_err();
    check(
        &fault,
        (Conflict, "crc32", &["shard 0, chunk 0", "as this chunk was uploaded before", "delete the job"]),
    );
    assert!(fault.value.starts_with(&format!("{:08x}", crc32(&other))), "{fault}");
    assert!(fault.limit.starts_with(&format!("{:08x}", crc32(first))), "{fault}");
    assert_eq!(job.progress().missing, vec![ShardId(0), ShardId(2)]);
    cluster.upload(&initial);
    assert_eq!(cluster.hash(), Reference::new(&spec, &initial).hash());
    let fault = upload(first).unwrap_err();
    check(&fault, (Precondition, "job.phase", &["training at version 0", "before the first step"]));
}

/// Rule, array, `applied`, first element, and the expected fault.
type StateCase = (Rule, StateArray, Option<u64>, f32, Expected);

const STATE_CASES: &[StateCase] = &[
    (
        Rule::Lion,
        StateArray::Second,
        Some(3),
        1.0,
        (Invalid, "array", &["second moments", "an array of lion"]),
    ),
    (
        Rule::AdamW,
        StateArray::First,
        None,
        1.0,
        (Invalid, "array", &["first moments", "`applied` is absent"]),
    ),
    (Rule::AdamW, StateArray::Master, Some(0), 1.0, (Invalid, "applied", &["at least 1", "weights alone"])),
    (
        Rule::AdamW,
        StateArray::First,
        Some(3),
        f32::NAN,
        (Invalid, "payload", &["NaN in layer.0, element 0", "first moments"]),
    ),
    (
        Rule::AdamW,
        StateArray::Second,
        Some(3),
        -1.0,
        (Invalid, "payload", &["-1 in layer.0, element 0", "not below 0"]),
    ),
    (Rule::Adagrad, StateArray::First, Some(3), -1.0, (Invalid, "payload", &["not below 0"])),
];

#[test]
fn bad_state_is_refused_and_changes_nothing() {
    for &(rule, array, applied, first, expected) in STATE_CASES {
        let spec = longshore_proto::JobSpec { rule, ..small() };
        let mut cluster = Cluster::open(&spec, 2, &cluster::compute(1, Isa::detect()));
        cluster.join(0);
        let mut payload = vec![0; 1 << 20];
        payload[..4].copy_from_slice(&first.to_le_bytes());
        let (shard, chunk, crc32) = (ShardId(0), ChunkId(0), crc32(&payload));
        let part = UploadChunk { shard, array, chunk, applied, left_out: Vec::new(), crc32 };
        check(&cluster.jobs[0].upload_chunk(Incarnation(1), part, &payload).unwrap_err(), expected);
        let initial = weights(&spec, 1);
        cluster.upload(&initial);
        assert_eq!(cluster.hash(), Reference::new(&spec, &initial).hash());
    }
}

#[test]
fn one_job_is_not_filled_from_two_states() {
    let spec = small();
    let initial = weights(&spec, 1);
    let bytes = encode_f32(&initial);
    let mut cluster = Cluster::open(&spec, 2, &cluster::compute(1, Isa::detect()));
    cluster.join(0);
    cluster.upload_array(StateArray::Master, &bytes, ShardId(0), (7, &[])).unwrap();
    let fault = cluster.upload_array(StateArray::Master, &bytes, ShardId(0), (8, &[])).unwrap_err();
    check(&fault, (Conflict, "applied", &["is 8", "be 7, as in the chunks before", "delete the job"]));
    let part = &bytes[..1 << 20];
    let fault =
        cluster::upload(&cluster.jobs[0], Incarnation(1), (ShardId(0), ChunkId(0)), part).unwrap_err();
    check(&fault, (Conflict, "applied", &["absent (weights alone)", "be 7"]));
    // Shard 0 has master weights but no moments, so it still counts as missing.
    assert_eq!(cluster.jobs[0].progress().missing, vec![ShardId(0), ShardId(2)]);
    cluster.upload_state(&[initial.clone(), initial.clone(), vec![0.0; initial.len()]], 7, &[]);
    assert_eq!(cluster.jobs[0].progress().applied, 7);
}

/// Late copies of chunks arrive around the end of loading. Servers acknowledge or refuse them, and never change weights
/// that are being trained.
#[test]
fn uploads_of_several_threads_load_once() {
    let mut spec = small();
    (spec.world_size, spec.micro_steps) = (1, 1);
    let initial = weights(&spec, 1);
    let flats = [gradient(&spec, 1, 1.0)];
    let mut reference = Reference::new(&spec, &initial);
    reference.step(&flats, &commit(&spec, 1));
    let bytes = encode_f32(&initial);
    for _ in 0..10 {
        let mut cluster = Cluster::open(&spec, 1, &cluster::compute(2, Isa::detect()));
        cluster.join(0);
        let job = &cluster.jobs[0];
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| upload_all(job, &bytes));
            }
        });
        cluster.step(&flats, &commit(&spec, 1));
        assert_eq!(cluster.hash(), reference.hash());
    }
}

fn upload_all(job: &longshore_engine::job::Job, bytes: &[u8]) {
    assert_eq!(job.join(Rank(0), Incarnation(1), None), Ok(true));
    for shard in 0..job.layout().shards() {
        let start = job.layout().shard_range(ShardId(shard)).start as usize * 4;
        let length = job.layout().shard_len(ShardId(shard)) as usize * 4;
        for (chunk, payload) in bytes[start..start + length].chunks(1 << 20).enumerate() {
            let chunk = ChunkId(chunk as u32);
            if let Err(fault) = cluster::upload(job, Incarnation(1), (ShardId(shard), chunk), payload) {
                assert_eq!(fault.field, "job.phase", "{fault}");
            }
        }
    }
}

/// Wrong lists of parameters with fewer updates. The job has two parameters.
#[test]
fn bad_counts_of_updates_are_refused_and_change_nothing() {
    let (spec, steps) = (small(), |param, steps| LeftOut { param, steps, now: false });
    let cases: [(Option<u64>, Vec<LeftOut>, Expected); 6] = [
        (Some(3), vec![steps(2, 1)], (Invalid, "left_out[0].param", &["is 2", "in 0..2", "fewer updates"])),
        (Some(3), vec![steps(1, 1), steps(0, 1)], (Invalid, "left_out[1].param", &["ascending order"])),
        (Some(3), vec![steps(0, 0)], (Invalid, "left_out[0].steps", &["at least 1"])),
        (Some(3), vec![steps(0, 4)], (Invalid, "left_out[0].steps", &["is 4", "at most 3"])),
        (None, vec![steps(0, 1)], (Invalid, "left_out[0].steps", &["at most 0"])),
        (
            Some(3),
            vec![LeftOut { param: 0, steps: 1, now: true }],
            (Invalid, "left_out[0].now", &["an upload is no step"]),
        ),
    ];
    let mut cluster = Cluster::open(&spec, 2, &cluster::compute(1, Isa::detect()));
    cluster.join(0);
    let payload = vec![0; 1 << 20];
    let upload = |applied, left_out| {
        let (array, shard, chunk, crc32) = (StateArray::Master, ShardId(0), ChunkId(0), crc32(&payload));
        let part = UploadChunk { shard, array, chunk, applied, left_out, crc32 };
        cluster.jobs[0].upload_chunk(Incarnation(1), part, &payload)
    };
    for (applied, left_out, expected) in cases {
        check(&upload(applied, left_out).unwrap_err(), expected);
    }
    upload(Some(3), vec![steps(1, 1)]).unwrap();
    let fault = upload(Some(3), Vec::new()).unwrap_err();
    check(
        &fault,
        (Conflict, "left_out", &["is of 0 parameters", "of 1 parameters, as in the chunks before"]),
    );
}
