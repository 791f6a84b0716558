//! Contributions that a server must not store.

use longshore_engine::{kernels::Isa, step::Admission};
use longshore_proto::{
    ChunkId, Contribution, ContributionChunk, Dtype, FaultKind, Incarnation, JobSpec, MicroStep, Partition,
    Rank, Reads, ShardId, Step, Version,
};

use super::{
    Expected, Midway, check,
    common::cluster::{Cluster, Stored, store},
};

use FaultKind::{Conflict, Fenced, Invalid, NotFound, Precondition};

type Case = (fn(&mut ContributionChunk), Expected);

const CASES: &[Case] = &[
    (
        |c| c.bytes -= 4,
        (Invalid, "payload", &["1048572 bytes", "1048576 bytes", "chunk 0", "chunks are 1 MiB"]),
    ),
    (|c| c.bytes = 0, (Invalid, "payload", &["0 bytes"])),
    (|c| c.bytes = u64::MAX, (Invalid, "payload", &["18446744073709551615 bytes"])),
    (|c| c.contribution.step = Step(0), (Invalid, "step", &["step is 0", "at least 1"])),
    (
        |c| c.contribution.step = Step(3),
        (Precondition, "step", &["step is 3", "at most 2", "wait for the commit"]),
    ),
    (|c| c.contribution.step = Step(u64::MAX), (Precondition, "step", &["at most 2"])),
    (|c| c.contribution.rank = Rank(2), (Invalid, "rank", &["rank is 2", "world size, 2"])),
    (|c| c.contribution.rank = Rank(u32::MAX), (Invalid, "rank", &["world size, 2"])),
    (
        |c| c.incarnation = Incarnation(0),
        (Fenced, "incarnation", &["incarnation is 0", "rank 1", "stop this process"]),
    ),
    (|c| c.contribution.shard = ShardId(1), (Precondition, "shard", &["shard is 1", "server 1's", "owner"])),
    (|c| c.contribution.shard = ShardId(3), (NotFound, "shard", &["shard is 3"])),
    (|c| c.contribution.shard = ShardId(u32::MAX), (NotFound, "shard", &["of 3 in the job"])),
    (|c| c.dtype = Dtype::Bf16, (Invalid, "dtype", &["bf16", "f32, as the job was opened"])),
    (|c| c.chunk = ChunkId(2), (Invalid, "chunk", &["chunk is 2", "below 2, the chunks of shard 0"])),
    (|c| c.chunk = ChunkId(u32::MAX), (Invalid, "chunk", &["below 2"])),
    (|c| c.contribution.micro_step = MicroStep(2), (Invalid, "micro_step", &["micro_step is 2", "below 2"])),
    (|c| c.loss_scale = f64::NAN, (Invalid, "loss_scale", &["NaN", "finite and above 0"])),
    (|c| c.loss_scale = 0.0, (Invalid, "loss_scale", &["is 0", "finite and above 0"])),
    (|c| c.loss_scale = -1.0, (Invalid, "loss_scale", &["is -1"])),
    (|c| c.loss_scale = f64::INFINITY, (Invalid, "loss_scale", &["is inf"])),
    (
        |c| c.loss_scale = 2.0,
        (Conflict, "loss_scale", &["is 2 (step 2, micro-step 1, rank 1, shard 0)", "must be 1,"]),
    ),
];

/// Pushes to server 0, even if another server owns the chunk's shard.
fn push(
    midway: &Midway,
    chunk: &ContributionChunk,
    payload: &[u8],
) -> Result<Stored, longshore_proto::Fault> {
    store(&midway.cluster.jobs[0], chunk, payload)
}

#[test]
fn bad_chunks_are_refused_and_change_nothing() {
    let midway = Midway::new();
    let before = midway.view();
    // Chunk 0 of shard 0 is stored, and chunk 1 comes next. In either of them the wrong field is found first.
    for (change, expected) in CASES {
        let mut chunk = midway.cluster.chunks(2, 1, 1, &midway.second[3])[0].0;
        change(&mut chunk);
        check(&push(&midway, &chunk, &vec![0; 1 << 20]).unwrap_err(), *expected);
        assert_eq!(midway.view(), before);
    }
    midway.finish();
}

#[test]
fn nobody_pushes_frozen_parameters() {
    let partitions = vec![Partition { first: 0, ranks: vec![Rank(0), Rank(1)] }, Partition::frozen(1)];
    let spec = JobSpec { partitions, ..super::small() };
    let frozen = spec.params[1].name.clone();
    let cluster = Cluster::started(&spec, 1, &super::weights(&spec, 1));
    let last = ShardId(cluster.layout.shards() - 1);
    assert!(cluster.layout.is_frozen(last));
    let flat = super::gradient(&spec, 7, 1.0);
    let trained = cluster.chunks(1, 0, 0, &flat);
    assert!(trained.iter().all(|(chunk, _)| chunk.contribution.shard != last));
    let (chunk, payload) = trained[0];
    let contribution = Contribution { shard: last, ..chunk.contribution };
    let fault = store(&cluster.jobs[0], &ContributionChunk { contribution, ..chunk }, payload).unwrap_err();
    check(&fault, (Invalid, "shard", &["is frozen", "spec.partitions", "send no gradient"]));
    assert!(fault.value.contains(&frozen), "{fault}");
}

#[test]
fn a_rank_pushes_its_own_partitions_and_no_other() {
    let partition = |first, rank| Partition { first, ranks: vec![Rank(rank)] };
    let spec = JobSpec { partitions: vec![partition(0, 1), partition(1, 0)], ..super::small() };
    let cluster = Cluster::started(&spec, 1, &super::weights(&spec, 1));
    let flat = super::gradient(&spec, 7, 1.0);
    let (mut chunk, payload) = cluster.chunks(1, 0, 1, &flat)[0];
    chunk.contribution.rank = Rank(0);
    chunk.incarnation = cluster.incarnations[0];
    let fault = store(&cluster.jobs[0], &chunk, payload).unwrap_err();
    check(&fault, (Invalid, "rank", &["rank is 0 (step 1", "contributors, [1]", "spec.partitions"]));
    assert!(cluster.jobs[0].protocol.waiting_for().unwrap().ends_with("shard 0 from rank 1"));
}

/// In step 3 of this delayed job, ranks may compute with version 1 or 2. All ranks must take the same one.
#[test]
fn ranks_compute_a_micro_step_with_one_version() {
    let spec = JobSpec { max_delay: 1, ..super::small() };
    let mut cluster = Cluster::started(&spec, 1, &super::weights(&spec, 1));
    let flats: Vec<_> = (0..4).map(|seed| super::gradient(&spec, seed, 1.0)).collect();
    (1..=2).for_each(|step| cluster.step(&flats, &super::commit(&spec, step)));
    let of = |cluster: &Cluster, rank: u32, micro_step, version| {
        let (chunk, payload) = cluster.chunks(3, micro_step, rank, &flats[0])[0];
        let reads = Reads { version: Version(version), decided_by: Incarnation(0) };
        store(&cluster.jobs[0], &ContributionChunk { reads, ..chunk }, payload)
    };
    let expected: Expected = (
        Conflict,
        "push.reads_version",
        &[
            "is 1 (step 3, micro-step 0, rank 1, shard 0)",
            "must be 2, with which rank 0",
            "flush on all ranks",
        ],
    );
    assert_eq!(of(&cluster, 0, 0, 2), Ok(Admission::New(None)));
    let before = format!("{:?} {:?}", cluster.jobs[0].progress(), cluster.jobs[0].protocol.waiting_for());
    check(&of(&cluster, 1, 0, 1).unwrap_err(), expected);
    assert_eq!(
        format!("{:?} {:?}", cluster.jobs[0].progress(), cluster.jobs[0].protocol.waiting_for()),
        before
    );
    // A chunk that names no version may have any. A rank that joins again may choose its version anew.
    assert_eq!(of(&cluster, 1, 0, 0), Ok(Admission::New(None)));
    cluster.join(1);
    check(&of(&cluster, 1, 0, 1).unwrap_err(), expected);
    cluster.join(0);
    assert_eq!(of(&cluster, 1, 0, 1), Ok(Admission::New(None)));
    let refused = of(&cluster, 0, 0, 2).unwrap_err();
    check(&refused, (Conflict, "push.reads_version", &["is 2 (step 3", "must be 1, with which rank 1"]));
    assert_eq!(of(&cluster, 0, 0, 1), Ok(Admission::New(None)));
}

/// All fields are right, but some bytes are missing. The server takes the chunk's ticket back, with the loss scale that
/// the chunk had set.
#[test]
fn a_payload_shorter_than_its_chunk_is_refused_and_leaves_no_trace() {
    let midway = Midway::new();
    let before = midway.view();
    let (chunk, payload) = midway.cluster.chunks(2, 1, 1, &midway.second[3])[1];
    let fault = push(&midway, &chunk, &payload[4..]).unwrap_err();
    assert_eq!((fault.kind, fault.field.as_str()), (Invalid, "payload"));
    assert_eq!(midway.view(), before);
    midway.finish();

    let mut fresh = Midway::new();
    let flats = fresh.second.clone();
    fresh.cluster.step(&flats, &super::commit(&fresh.cluster.spec, 2));
    let (chunk, payload) = fresh.cluster.chunks(3, 0, 0, &flats[0])[0];
    let before = fresh.view();
    assert_eq!(push(&fresh, &chunk, &payload[4..]).unwrap_err().kind, Invalid);
    assert_eq!(fresh.view(), before);
    let honest = fresh.cluster.chunks(3, 0, 0, &flats[0])[0].0;
    assert_eq!(push(&fresh, &honest, payload), Ok(Admission::New(None)));
}

#[test]
fn a_job_that_is_loading_takes_no_gradient() {
    let spec = super::small();
    let mut cluster = super::Cluster::open(&spec, 1, &super::common::cluster::compute(1, Isa::detect()));
    cluster.join(0);
    let flat = super::gradient(&spec, 1, 1.0);
    let (chunk, payload) = cluster.chunks(1, 0, 0, &flat)[0];
    let expected: Expected =
        (Precondition, "job.phase", &["loading", "training", "upload the initial weights"]);
    check(&cluster.store(&chunk, payload).unwrap_err(), expected);
    check(&cluster.commit(&super::commit(&spec, 1)).unwrap_err(), expected);
    check(&cluster.image(ShardId(0), 0).unwrap_err(), expected);
    check(&cluster.jobs[0].statistics(ShardId(0), Step(1)).unwrap_err(), expected);
    check(&cluster.jobs[0].protocol.pause(Incarnation(1), "why").unwrap_err(), expected);
}
