//! Chunks, decisions and pulls with one wrong field, and bytes that are no requests at all.

use std::{
    io::{Read, Write},
    net::TcpStream,
    time::Duration,
};

use bytes::Bytes;
use longshore_proto::{
    Commit, Correction, Dtype,
    FaultKind::{Conflict, Corrupt, Fenced, Invalid, NotFound, Precondition},
    Incarnation, JobSpec, Layout, Param,
    checksum::crc32,
};
use longshore_tests::conformance::{
    cluster::Cluster,
    raw::{At, Raw, assert_fault, chunk, decision, placement},
    synthetic::Synthetic,
};
use longshore_wire::{Wire, v1};
use tonic::Code;

use super::{BEFORE, Victim, plan};

#[test]
fn a_wrong_chunk_is_refused_and_settles_nothing() {
    let cluster = Cluster::start(2);
    let victim = Victim::start(&cluster, "pushed-wrongly");
    let right = || victim.chunk();
    let short = right().payload.slice(2..);
    let cut = v1::PushRequest { crc32: crc32(&short), payload: short, ..right() };
    let (old, late) = (victim.incarnation.0 - 1, 86_400_001);
    // The engine's own table has every field. Here are fields of the message alone, and a refusal of each kind.
    let wrong = [
        (Invalid, "payload", "131070 bytes", "131072 bytes", cut),
        (Precondition, "step", "4", "at most 3", v1::PushRequest { step: 4, ..right() }),
        (NotFound, "shard", "1", "one this server owns, of 4", v1::PushRequest { shard: 1, ..right() }),
        (Conflict, "loss_scale", "2 (step 3", "1, that of", v1::PushRequest { loss_scale: 2.0, ..right() }),
        (Fenced, "incarnation", &old.to_string(), "", v1::PushRequest { incarnation: old, ..right() }),
        (Invalid, "push.dtype", "0", "named", v1::PushRequest { dtype: 0, ..right() }),
        (Invalid, "deadline_ms", "86400001", "at most", v1::PushRequest { deadline_ms: late, ..right() }),
        (Invalid, "incarnation", "0", "at least 1", v1::PushRequest { incarnation: 0, ..right() }),
        (NotFound, "job", "nobody", "open", v1::PushRequest { job: "nobody".into(), ..right() }),
        (Invalid, "job", "no/body", "A-Z", v1::PushRequest { job: "no/body".into(), ..right() }),
    ];
    for (kind, field, value, limit, request) in wrong {
        assert_fault(victim.servers[0].push(request), kind, field, value, limit);
    }
    let zero = format!("{:08x}", right().crc32);
    let torn = v1::PushRequest { crc32: 1, ..right() };
    assert_fault(victim.servers[0].push(torn), Corrupt, "push.crc32", "00000001", &zero);
    victim.finish();
}

#[test]
fn a_second_gradient_for_the_same_chunk_is_refused_with_both_checksums() {
    let cluster = Cluster::start(1);
    let (spec, layout) = one_block("conflict");
    let server = loaded(&cluster, &spec, &layout);
    let at = At { step: 1, rank: 0, incarnation: Incarnation(7) };
    let first = chunk(&spec, &layout, 0, at);
    let payload = Bytes::from(vec![1; first.payload.len()]);
    let second = v1::PushRequest { crc32: crc32(&payload), payload, ..first.clone() };
    let sums = [first.crc32, second.crc32].map(|sum| format!("{sum:08x}"));
    let place = "01 00 at element 65535 of the flat space";
    assert_fault(server.push(padded(first.clone())), Invalid, "payload", place, "0 there");
    assert_eq!(server.push(first.clone()), Ok(false));
    assert_fault(server.push(second.clone()), Conflict, "crc32", &sums[1], &sums[0]);
    assert_eq!(server.push(first.clone()), Ok(true), "the same chunk again is acknowledged");
    server.await_stats("conflict", 1);
    server.commit("conflict", at.incarnation, &decision(&spec, 1)).expect("the set is complete");
    // After the decision no stored chunk is left to compare with, and the answer says so.
    for late in [first, second] {
        let result = server.push_all(vec![late]).expect("an answer").pop().expect("a result");
        assert!(result.decided && !result.duplicate && result.refusal.is_none(), "{result:?}");
    }
    assert_eq!(server.progress("conflict").version, 1);
}

/// Returns the same chunk with a nonzero value in its last element.
fn padded(chunk: v1::PushRequest) -> v1::PushRequest {
    let mut payload = chunk.payload.to_vec();
    let last = payload.len() - 2;
    payload[last] = 1;
    v1::PushRequest { crc32: crc32(&payload), payload: payload.into(), ..chunk }
}

/// In reverse order a chunk would wait for one behind it on its own stream. The server refuses it at once,
/// not after a minute.
#[test]
fn micro_steps_out_of_order_are_refused_at_once_and_waits_end_when_asked_to() {
    let cluster = Cluster::start(1);
    let (spec, _) = one_block("micro-steps");
    let params = vec![Param { name: "w".into(), shape: vec![12 * 65536], group: 0 }];
    let spec = JobSpec { params, micro_steps: 2, shard_elements: 12 * 65536, ..spec };
    let layout = spec.validate().expect("a spec");
    let server = loaded(&cluster, &spec, &layout);
    let at = At { step: 1, rank: 0, incarnation: Incarnation(7) };
    let first = chunk(&spec, &layout, 0, at);
    let make = |micro_step: u32, chunk: u32| {
        let payload = Bytes::from(vec![0; if chunk == 0 { 1 << 20 } else { 1 << 19 }]);
        v1::PushRequest { micro_step, chunk, crc32: crc32(&payload), payload, ..first.clone() }
    };
    let begun = std::time::Instant::now();
    let order = vec![make(1, 0), make(1, 1), make(0, 0), make(0, 1)];
    let results = server.push_all(order).expect("answers");
    let refused: Vec<Option<String>> =
        results.iter().map(|result| result.refusal.as_ref().map(|fault| fault.field.clone())).collect();
    let micro_step = || Some("micro_step".to_string());
    assert_eq!(refused, [micro_step(), micro_step(), None, None]);
    assert!(begun.elapsed() < Duration::from_secs(20), "it waited for {:?}", begun.elapsed());
    // The second micro-step of step 1 is in order. The lower micro-step behind it is not.
    let results = server.push_all(vec![make(1, 0), make(0, 0), make(1, 1)]).expect("answers");
    assert!(results.iter().all(|result| result.refusal.is_none()), "{results:?}");
    server.await_stats("micro-steps", 1);
    let decided = Commit { gradient_scale: 2.0, ..decision(&spec, 1) };
    server.commit("micro-steps", at.incarnation, &decided).expect("the set is complete");

    let later = |request: v1::PushRequest| v1::PushRequest { step: 2, ..request };
    let hasty = v1::PushRequest { deadline_ms: 100, ..later(make(1, 0)) };
    let results = server.push_all(vec![later(make(0, 0)), hasty, later(make(0, 1))]).expect("answers");
    let kinds: Vec<Option<&str>> =
        results.iter().map(|result| result.refusal.as_ref().map(|fault| fault.kind.as_str())).collect();
    assert_eq!(kinds, [None, Some("DEADLINE"), None], "the one between waits for the one behind it");
    let fault = results[1].refusal.as_ref().expect("a refusal");
    assert!(fault.remedy.contains("step 2, micro-step 0, shard 0 from rank 0"), "{fault:?}");
}

#[test]
fn a_wrong_decision_is_refused_and_decides_nothing() {
    let cluster = Cluster::start(2);
    let victim = Victim::start(&cluster, "decided-wrongly");
    let server = &victim.servers[0];
    let next = || decision(&victim.spec, BEFORE + 1);
    let mut endless = next();
    endless.groups[1].lr = f64::NAN;
    let missing = "missing: step 3, micro-step 0, shard 0 from rank 0";
    let ahead = Commit { correction: Correction::LookAhead(vec![0.1; 2]), ..next() };
    let wrong = [
        (Precondition, "commit.step", "3", missing, next()),
        (Conflict, "commit.clip_coefficient", "step 2", "as first decided", decision(&victim.spec, 2)),
        (Invalid, "commit.groups[1].lr", "NaN", "finite", endless),
        (Invalid, "commit.look_ahead", "given", "max_delay 0", ahead),
    ];
    for (kind, field, value, limit, commit) in wrong {
        let found = server.commit(victim.job(), victim.incarnation, &commit);
        assert_fault(found, kind, field, value, limit);
    }
    victim.finish();
}

#[test]
fn what_cannot_be_pulled_is_refused() {
    let cluster = Cluster::start(2);
    let victim = Victim::start(&cluster, "pulled-wrongly");
    let (server, job) = (&victim.servers[0], victim.job());
    let whole = v1::Slice { shard: 0, offset: 0, elements: 65536 };
    let pull = |version, slice| server.pull(job, version, Dtype::Bf16, slice);
    assert_fault(pull(BEFORE - 2, whole), NotFound, "version", "0", "those kept: 1 and 2");
    assert_fault(pull(BEFORE + 2, whole), Precondition, "version", "4", "at most 3");
    let beyond = v1::Slice { offset: u64::MAX, ..whole };
    assert_fault(pull(BEFORE, beyond), Invalid, "slice", "of shard 0", "inside the shard's 65536");
    assert_eq!(pull(BEFORE - 1, whole).expect("the version before").len(), 131072);
    victim.finish();
}

#[test]
fn garbage_on_the_port_harms_nobody() {
    let cluster = Cluster::start(2);
    let victim = Victim::start(&cluster, "garbage");
    let noise: Vec<u8> =
        (0..70_000u32).map(|index| (index.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let http = b"GET / HTTP/1.1\r\nHost: longshore\r\n\r\n";
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff\xff\xff\x00\x00\x00\x00\x00\x00";
    for bytes in [&noise[..], http, preface, &[0; 9], &preface[..10]] {
        let mut stream = TcpStream::connect(cluster.address(0)).expect("a connection");
        stream.set_read_timeout(Some(Duration::from_millis(200))).expect("a timeout");
        // The server may close the connection during this write.
        let _ = stream.write_all(bytes);
        let _ = stream.read(&mut [0; 1024]);
    }
    victim.finish();
}

#[test]
fn an_oversized_message_is_refused_by_its_size() {
    let cluster = Cluster::start(2);
    let victim = Victim::start(&cluster, "oversized");
    let server = &victim.servers[0];
    let payload = Bytes::from(vec![0; 5 << 20]);
    let push = v1::PushRequest { crc32: crc32(&payload), payload, ..victim.chunk() };
    assert_fault(server.push(push), Invalid, "message", "5242923 bytes", "at most 1052672 bytes");
    let describe = v1::DescribeRequest { job: "x".repeat(17 << 20), ..Default::default() };
    let status = server.status(server.admin.clone().describe(describe));
    assert_eq!(status.code(), Code::OutOfRange, "{status:?}");
    let long = v1::DescribeRequest { job: "x".repeat(129), ..Default::default() };
    let found = server.call(server.admin.clone().describe(long));
    assert_fault(found, Invalid, "job", "xxx", "1 to 128");
    victim.finish();
}

fn one_block(job: &str) -> (JobSpec, Layout) {
    let params = vec![Param { name: "w".into(), shape: vec![33], group: 0 }];
    let spec = JobSpec { params, groups: vec!["all".into()], ..plan().spec(job, &Synthetic::default()) };
    let layout = spec.validate().expect("a spec");
    (spec, layout)
}

/// A job that is opened, joined as incarnation 7, and filled with zeros.
fn loaded(cluster: &Cluster, spec: &JobSpec, layout: &Layout) -> Raw {
    let (server, job) = (cluster.raw(0), spec.name.as_str());
    let opened = server.open(spec.to_wire(), &placement(&cluster.addresses(), layout), 0).expect("an open");
    assert!(opened.created);
    server.join(job, 0, 7).expect("a join");
    let whole = Bytes::from(vec![0; layout.elements() as usize * 4]);
    let payload = whole.slice(..whole.len().min(1 << 20));
    let upload = v1::UploadRequest {
        job: job.into(),
        incarnation: 7,
        shard: 0,
        chunk: 0,
        crc32: crc32(&payload),
        payload: payload.clone(),
        ..Default::default()
    };
    let early = server.push(chunk(spec, layout, 0, At { step: 1, rank: 0, incarnation: Incarnation(7) }));
    assert_fault(early, Precondition, "job.phase", "loading", "training");
    let torn = v1::UploadRequest { crc32: 0, ..upload.clone() };
    let found = server.call(server.tensors.clone().upload(tokio_stream::iter([torn])));
    assert_fault(found, Corrupt, "upload.crc32", "00000000", &format!("{:08x}", upload.crc32));
    let infinite = Bytes::from([&f32::INFINITY.to_le_bytes()[..], &payload[4..]].concat());
    let found = v1::UploadRequest { crc32: crc32(&infinite), payload: infinite, ..upload.clone() };
    let found = server.call(server.tensors.clone().upload(tokio_stream::iter([found])));
    assert_fault(found, Invalid, "payload", "inf in w, element 0", "finite");
    let nobody = v1::UploadRequest { incarnation: 0, ..upload.clone() };
    let found = server.call(server.tensors.clone().upload(tokio_stream::iter([nobody])));
    assert_fault(found, Invalid, "incarnation", "0", "at least 1");
    assert_fault(server.join(job, 0, 0), Invalid, "incarnation", "0", "at least 1");
    let uploads: Vec<_> = (0..layout.chunks(longshore_proto::ShardId(0), Dtype::F32))
        .map(|chunk| {
            let start = chunk as usize * (1 << 20);
            let payload = whole.slice(start..whole.len().min(start + (1 << 20)));
            v1::UploadRequest { chunk, crc32: crc32(&payload), payload, ..upload.clone() }
        })
        .collect();
    let count = uploads.len() as u64;
    let chunks = server.call(server.tensors.clone().upload(tokio_stream::iter(uploads)));
    assert_eq!(chunks.expect("an upload").chunks, count);
    server
}
