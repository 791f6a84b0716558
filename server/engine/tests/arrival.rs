//! Chunks whose payload arrives in slices. A chunk counts once its whole payload is there with the right checksum.
//! Otherwise the chunk leaves no trace.

use std::sync::Arc;

use longshore_engine::{
    job::{Job, Writing},
    step::Admission,
};
use longshore_proto::{ContributionChunk, Dtype, FaultKind, Incarnation, JobSpec, Rank};

use crate::common::{self, BLOCK, cluster::Cluster, gradient, spec, weights};

/// A job of one rank and one shard. The shard has two chunks of full length in bf16, and a shorter one.
fn small() -> JobSpec {
    let mut spec = spec(&[17 * BLOCK as u64], &[0]);
    spec.gradient_dtype = Dtype::Bf16;
    spec.shard_elements = 32 * BLOCK as u64;
    (spec.world_size, spec.micro_steps) = (1, 1);
    spec
}

fn admit(job: &Arc<Job>, chunk: &ContributionChunk) -> Writing {
    match job.admit(chunk).unwrap() {
        Admission::New(writing) => writing,
        _ => panic!("{chunk:?} was not admitted"),
    }
}

#[test]
fn slices_of_several_chunks_may_alternate() {
    let spec = small();
    let flat = gradient(&spec, 1, 1.0);
    let mut whole = Cluster::started(&spec, 1, &weights(&spec, 1));
    whole.step(std::slice::from_ref(&flat), &common::commit(&spec, 1));

    let mut cluster = Cluster::started(&spec, 1, &weights(&spec, 1));
    let chunks = cluster.chunks(1, 0, 0, &flat);
    assert_eq!(chunks.len(), 3);
    let job = Arc::clone(&cluster.jobs[0]);
    let mut writings: Vec<_> = chunks.iter().map(|(chunk, _)| admit(&job, chunk)).collect();
    // A slice of 300001 bytes ends inside an element, and is longer than the copy under one lock.
    for at in (0..1 << 20).step_by(300_001) {
        for (writing, (_, payload)) in writings.iter_mut().zip(&chunks) {
            let slice = payload.get(at..).unwrap_or_default();
            writing.write(&slice[..slice.len().min(300_001)]).unwrap();
        }
    }
    for writing in writings.into_iter().rev() {
        cluster.works[0].extend(writing.finish().unwrap());
    }
    cluster.work();
    cluster.commit(&common::commit(&spec, 1)).unwrap();
    cluster.work();
    assert_eq!(cluster.hash(), whole.hash());
}

#[test]
fn what_breaks_off_was_never_there() {
    let spec = small();
    let flat = gradient(&spec, 1, 1.0);
    let mut cluster = Cluster::started(&spec, 1, &weights(&spec, 1));
    let (chunk, payload) = cluster.chunks(1, 0, 0, &flat)[0];
    let job = Arc::clone(&cluster.jobs[0]);

    let mut writing = admit(&job, &chunk);
    writing.write(&payload[..1000]).unwrap();
    // While the chunk arrives, the same chunk from another connection must wait, and so must a join of the rank.
    assert_eq!(cluster.store(&chunk, payload), Ok(Admission::Busy));
    assert_eq!(job.join(Rank(0), Incarnation(2), None), Ok(false));
    drop(writing);
    assert!(!job.protocol.is_step_begun());

    let mut damaged = payload.to_vec();
    damaged[12] ^= 1;
    let mut writing = admit(&job, &chunk);
    writing.write(&damaged).unwrap();
    let fault = writing.finish().unwrap_err();
    assert_eq!((fault.kind, fault.field.as_str()), (FaultKind::Corrupt, "push.crc32"));
    assert!(!job.protocol.is_step_begun());

    let mut writing = admit(&job, &chunk);
    writing.write(&payload[1..]).unwrap();
    assert_eq!(writing.write(&payload[..2]).unwrap_err().kind, FaultKind::Invalid);
    assert_eq!(writing.finish().unwrap_err().field, "payload");
    assert!(!job.protocol.is_step_begun());
    assert_eq!(cluster.store(&chunk, payload), Ok(Admission::New(None)));
    assert_eq!(job.traffic().0, payload.len() as u64);
}
