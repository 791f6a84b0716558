//! Initialisations that must not be taken, and uploads beside them.

use longshore_engine::kernels::Isa;
use longshore_proto::{
    ChunkId, FaultKind, Incarnation, InitialRun, InitialWeights, Initialisation, ShardId, StateArray,
    checksum::crc32,
};

use super::{Cluster, Reference, check, common, small};

use FaultKind::{Conflict, Fenced, Invalid, Precondition};

fn all(seed: u64, weights: InitialWeights) -> Initialisation {
    Initialisation { seed, runs: vec![InitialRun::new(0, weights)] }
}

fn opened() -> Cluster {
    Cluster::open(&small(), 1, &common::cluster::compute(1, Isa::detect()))
}

#[test]
fn bad_initialisations_are_refused_and_change_nothing() {
    let mut cluster = opened();
    let job = cluster.jobs[0].clone();
    let normal = |std| all(1, InitialWeights::Normal { mean: 0.0, std });
    let make = |initialisation: Initialisation| job.make_weights(Incarnation(1), initialisation).unwrap_err();
    check(&make(normal(1.0)), (Precondition, "rank", &["rank is 0", "joined"]));
    cluster.join(0);
    let fenced = job.make_weights(Incarnation(0), normal(1.0)).unwrap_err();
    check(&fenced, (Fenced, "incarnation", &["incarnation is 0"]));
    let field = "initialisation.runs[0].std";
    check(&make(normal(-1.0)), (Invalid, field, &["-1 (of parameter layer.0)", "at least 0"]));
    check(&make(normal(f64::NAN)), (Invalid, field, &["NaN (of parameter layer.0)", "finite"]));
    let beyond = Initialisation {
        seed: 1,
        runs: [0, 99].map(|first| InitialRun::new(first, InitialWeights::Constant(0.0))).to_vec(),
    };
    check(&make(beyond), (Invalid, "initialisation.runs[1].first", &["99", "in 1..2"]));
    let initial = common::weights(&cluster.spec, 1);
    cluster.upload(&initial);
    assert_eq!(cluster.hash(), Reference::new(&cluster.spec, &initial).hash());
    let expected = (
        Conflict,
        "initialisation",
        &["is another one", "shard 0 here were made from", "delete the job"][..],
    );
    check(&make(normal(1.0)), expected);
}

#[test]
fn weights_come_from_one_place_each() {
    let mut cluster = opened();
    cluster.join(0);
    let job = cluster.jobs[0].clone();
    let params = cluster.spec.params.len();
    let mut kinds = vec![InitialWeights::Constant(1.0); params];
    kinds[params - 1] = InitialWeights::Uploaded;
    let given = Initialisation::by_param(1, kinds);
    job.make_weights(Incarnation(1), given.clone()).unwrap();
    job.make_weights(Incarnation(1), given.clone()).unwrap();
    let other = Initialisation { seed: 2, ..given };
    let fault = job.make_weights(Incarnation(1), other).unwrap_err();
    check(&fault, (Conflict, "initialisation", &["another one", "begun with", "delete the job"]));
    let upload = |payload: &[u8]| job.upload(Incarnation(1), ShardId(0), ChunkId(0), crc32(payload), payload);
    let mut payload = vec![0; 1 << 20];
    payload[8] = 1;
    let fault = upload(&payload).unwrap_err();
    check(
        &fault,
        (Conflict, "payload", &["at element 2 of parameter layer.0", "the servers make", "no others"]),
    );
    payload[8] = 0;
    upload(&payload).expect("zeros change nothing");
    let chunk = longshore_engine::job::UploadChunk {
        shard: ShardId(0),
        array: StateArray::Master,
        chunk: ChunkId(0),
        applied: Some(3),
        left_out: Vec::new(),
        crc32: crc32(&payload),
    };
    let fault = job.upload_chunk(Incarnation(1), chunk, &payload).unwrap_err();
    check(&fault, (Conflict, "applied", &["applied is 3", "weights alone"]));
}

#[test]
fn what_was_uploaded_first_is_not_made() {
    let mut cluster = opened();
    cluster.join(0);
    let job = cluster.jobs[0].clone();
    let payload = vec![0; 1 << 20];
    job.upload(Incarnation(1), ShardId(0), ChunkId(0), crc32(&payload), &payload).unwrap();
    let fault = job.make_weights(Incarnation(1), all(1, InitialWeights::Constant(1.0))).unwrap_err();
    check(&fault, (Conflict, "initialisation", &["given", "rank 0 has begun to upload", "delete the job"]));
}
