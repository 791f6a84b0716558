//! Messages with one wrong field are refused by name where servers read them, and change nothing. Fields that the
//! engine judges are in the engine's tests.

use std::{fs::OpenOptions, os::unix::fs::FileExt, path::Path, time::Instant};

use bytes::Bytes;
use longshore_proto::{
    Commit, Correction, Dtype,
    FaultKind::{self, Corrupt, Fenced, Invalid, NotFound, Precondition},
    Incarnation, JobSpec, Layout, Param, ShardId,
    checksum::crc32,
    limits::PROTOCOL,
};
use longshore_tests::{
    command::longshore,
    conformance::{
        cluster::{Cluster, eventually},
        raw::{At, Raw, assert_fault, chunk, decision, placement},
        run,
        scenario::Scenario,
        synthetic::Synthetic,
    },
};
use longshore_wire::{
    Author, Wire,
    v1::{self, Phase},
};
use longshore_worker::{Error, Session};

const INCARNATION: Incarnation = Incarnation(7);
const AT: At = At { step: 1, rank: 0, incarnation: INCARNATION };

/// Returns a job with one parameter of this many elements in one shard.
fn one_shard(job: &str, elements: u64) -> (JobSpec, Layout) {
    let params = vec![Param { name: "w".into(), shape: vec![elements], group: 0 }];
    let spec = Scenario::exact(4).spec(job, &Synthetic::default());
    let shard_elements = elements.next_multiple_of(65_536);
    let spec = JobSpec { params, groups: vec!["all".into()], shard_elements, ..spec };
    let layout = spec.validate().expect("a spec");
    (spec, layout)
}

/// Opens a job and joins it. Tries uploads that the server must refuse, then fills the job with zeros. Returns the
/// client.
fn loaded(cluster: &Cluster, spec: &JobSpec, layout: &Layout) -> Raw {
    let (server, job) = (cluster.raw(0), spec.name.as_str());
    server.open(spec.to_wire(), &placement(&cluster.addresses(), layout), 0).expect("an open");
    server.join(job, 0, INCARNATION.0).expect("a join");
    let upload = |chunk: u32, payload: Bytes| v1::UploadRequest {
        job: job.into(),
        incarnation: INCARNATION.0,
        chunk,
        crc32: crc32(&payload),
        payload,
        ..Default::default()
    };
    let send = |uploads: Vec<v1::UploadRequest>| {
        server.call(server.tensors.clone().upload(tokio_stream::iter(uploads)))
    };
    let whole = Bytes::from(vec![0; layout.elements() as usize * 4]);
    let cut = |chunk: u32| {
        let start = chunk as usize * (1 << 20);
        upload(chunk, whole.slice(start..whole.len().min(start + (1 << 20))))
    };
    let infinite = Bytes::from([&f32::INFINITY.to_le_bytes()[..], &cut(0).payload[4..]].concat());
    let sum = format!("{:08x}", cut(0).crc32);
    for (kind, field, value, limit, wrong) in [
        (Corrupt, "upload.crc32", "00000000", &*sum, v1::UploadRequest { crc32: 0, ..cut(0) }),
        (Invalid, "payload", "inf in w, element 0", "finite", upload(0, infinite)),
        (Invalid, "incarnation", "0", "at least 1", v1::UploadRequest { incarnation: 0, ..cut(0) }),
    ] {
        assert_fault(send(vec![wrong]), kind, field, value, limit);
    }
    let chunks = layout.chunks(ShardId(0), Dtype::F32);
    assert_eq!(send((0..chunks).map(cut).collect()).expect("an upload").chunks, u64::from(chunks));
    server
}

#[test]
fn wrong_messages_are_refused_and_change_nothing() {
    let cluster = Cluster::start(1);
    let (spec, layout) = one_shard("job", 33);
    let server = loaded(&cluster, &spec, &layout);
    let right = || chunk(&spec, &layout, 0, AT);
    let (large, late) = (Bytes::from(vec![0; 5 << 20]), 86_400_001);
    let large = v1::PushRequest { crc32: crc32(&large), payload: large, ..right() };
    let zero = format!("{:08x}", right().crc32);
    let pushes: [(FaultKind, &str, &str, &str, v1::PushRequest); 7] = [
        (Invalid, "push.dtype", "0", "named", v1::PushRequest { dtype: 0, ..right() }),
        (Invalid, "deadline_ms", "86400001", "at most", v1::PushRequest { deadline_ms: late, ..right() }),
        (Invalid, "incarnation", "0", "at least 1", v1::PushRequest { incarnation: 0, ..right() }),
        (NotFound, "job", "nobody", "open", v1::PushRequest { job: "nobody".into(), ..right() }),
        (Invalid, "job", "no/body", "A-Z", v1::PushRequest { job: "no/body".into(), ..right() }),
        (Corrupt, "push.crc32", "00000001", &zero, v1::PushRequest { crc32: 1, ..right() }),
        (Invalid, "message", "bytes", "at most 1052672 bytes", large),
    ];
    for (kind, field, value, limit, request) in pushes {
        assert_fault(server.push(request), kind, field, value, limit);
    }

    let mut endless = decision(&spec, 1);
    endless.groups[0].lr = f64::NAN;
    let ahead = Commit { correction: Correction::LookAhead(vec![0.1]), ..decision(&spec, 1) };
    for (field, value, limit, commit) in [
        ("commit.groups[0].lr", "NaN", "finite", endless),
        ("commit.look_ahead", "given", "max_delay 0", ahead),
    ] {
        assert_fault(server.commit("job", INCARNATION, &commit), Invalid, field, value, limit);
    }

    let (placed, other) =
        (placement(&cluster.addresses(), &layout), || v1::JobSpec { name: "other".into(), ..spec.to_wire() });
    for (field, value, limit, wrong) in [
        ("spec.rule", "99", "named", v1::JobSpec { rule: 99, ..other() }),
        ("spec.state_format", "9", "named", v1::JobSpec { state_format: 9, ..other() }),
        ("spec.name", "../escape", "A-Z a-z", v1::JobSpec { name: "../escape".into(), ..other() }),
    ] {
        assert_fault(server.open(wrong, &placed, 0), Invalid, field, value, limit);
    }
    // An older server cannot know the meaning of a newer client's fields.
    let newer = v1::OpenJobRequest {
        spec: Some(other()),
        placement: Some(placed.to_wire()),
        protocol: PROTOCOL + 1,
        ..Default::default()
    };
    let opened = server.call(server.training.clone().open_job(newer));
    assert_fault(opened, Precondition, "protocol", "2", "at most 1");
    // A server that has lost the job must not begin an empty part of it.
    let lost = v1::OpenJobRequest {
        spec: Some(other()),
        placement: Some(placed.to_wire()),
        is_there: true,
        ..Default::default()
    };
    assert_fault(
        server.call(server.training.clone().open_job(lost)),
        NotFound,
        "job",
        "other",
        "open on this server",
    );
    assert!(server.find("other").is_err(), "it was not opened");
    assert_fault(server.find(&"x".repeat(129)), Invalid, "job", "xxx", "1 to 128");

    assert_eq!(server.push(right()), Ok(false));
    server.await_stats("job", 1);
    server.commit("job", INCARNATION, &decision(&spec, 1)).expect("the set is complete");
    // After the decision the server has no stored chunk to compare with, so the answer is `decided`.
    let result = server.push_all(vec![right()]).expect("an answer").pop().expect("a result");
    assert!(result.decided && !result.duplicate && result.refusal.is_none(), "{result:?}");
    assert_eq!(server.progress("job").version, 1);
}

/// Rank 0 may die while it waits for a step's statistics. The server must then end the call.
#[test]
fn a_wait_for_statistics_ends_with_its_caller() {
    let cluster = Cluster::start(1);
    let (spec, layout) = one_shard("waits", 33);
    let rank = loaded(&cluster, &spec, &layout);
    let request = v1::StatsRequest { job: "waits".into(), step: 1, deadline_ms: 3_600_000 };
    let answers = rank.call(rank.training.clone().stats(request)).expect("a stream");
    let transport = || cluster.raw(0).describe("waits").ranks[0].transport.clone();
    assert!(!transport().is_empty());
    drop((answers, rank));
    eventually("the rank to be gone", || transport().is_empty().then_some(()));
}

/// In reverse order a chunk would wait for another one that follows on the same stream. The server refuses the chunk at
/// once, not after a minute.
#[test]
fn micro_steps_out_of_order_are_refused_at_once_and_waits_end_when_asked_to() {
    let cluster = Cluster::start(1);
    let (spec, layout) = one_shard("micro-steps", 12 * 65_536);
    let spec = JobSpec { micro_steps: 2, ..spec };
    let server = loaded(&cluster, &spec, &layout);
    let make = |micro_step: u32, index: u32| {
        let payload = Bytes::from(vec![0; if index == 0 { 1 << 20 } else { 1 << 19 }]);
        let first = chunk(&spec, &layout, 0, AT);
        v1::PushRequest { micro_step, chunk: index, crc32: crc32(&payload), payload, ..first }
    };
    let refused = |requests: Vec<v1::PushRequest>| -> Vec<String> {
        let results = server.push_all(requests).expect("answers");
        results.into_iter().map(|result| result.refusal.unwrap_or_default().field).collect()
    };
    let begun = Instant::now();
    let order = vec![make(1, 0), make(1, 1), make(0, 0), make(0, 1)];
    assert_eq!(refused(order), ["micro_step", "micro_step", "", ""]);
    assert!(begun.elapsed().as_secs() < 20, "it waited for {:?}", begun.elapsed());
    // The second micro-step of step 1 is in order. The lower micro-step behind it is not.
    assert_eq!(refused(vec![make(1, 0), make(0, 0), make(1, 1)]), ["", "", ""]);
    server.await_stats("micro-steps", 1);
    let decided = Commit { gradient_scale: 2.0, ..decision(&spec, 1) };
    server.commit("micro-steps", INCARNATION, &decided).expect("the set is complete");

    let later = |request: v1::PushRequest| v1::PushRequest { step: 2, ..request };
    let hasty = v1::PushRequest { deadline_ms: 100, ..later(make(1, 0)) };
    let results = server.push_all(vec![later(make(0, 0)), hasty, later(make(0, 1))]).expect("answers");
    let kinds: Vec<Option<&str>> =
        results.iter().map(|result| result.refusal.as_ref().map(|fault| fault.kind.as_str())).collect();
    assert_eq!(kinds, [None, Some("DEADLINE"), None], "the one between waits for the one behind it");
    let fault = results[1].refusal.as_ref().expect("a refusal");
    assert!(fault.remedy.contains("step 2, micro-step 0, shard 0 from rank 0"), "{fault:?}");
}

/// A failed seal is kept with its job only if the job is open. Names with forbidden characters are refused before.
#[test]
fn a_checkpoint_that_fails_before_its_job_is_open_is_not_the_jobs() {
    let cluster = Cluster::start(1);
    let server = cluster.raw(0);
    let seal = |job: &str, name: &str| {
        let (job, name) = (job.to_string(), name.to_string());
        let request = v1::SealCheckpointRequest { job, name, parts: vec!["{\"\n".into()] };
        server.call(server.admin.clone().seal_checkpoint(request))
    };
    let forged = "a\n2026-01-01T00:00:00Z  INFO audit: who=\"operator\"";
    assert_fault(seal(forged, "last"), Invalid, "job", "\\n", "A-Z");
    assert_fault(seal("ghost", forged), Invalid, "name", "\\n", "A-Z");
    let mut admin = server.admin.clone();
    let discard = v1::DiscardCheckpointRequest { job: "ghost".into(), name: forged.into() };
    assert_fault(server.call(admin.discard_checkpoint(discard)), Invalid, "name", "\\n", "A-Z");
    assert!(seal("ghost", "last").is_err());
    let (spec, layout) = one_shard("ghost", 33);
    server.open(spec.to_wire(), &placement(&cluster.addresses(), &layout), 0).expect("an open");
    assert_eq!(server.describe("ghost").checkpoints, None);
    let fault = seal("ghost", "last").expect_err("parts that are none");
    let failure = server.describe("ghost").checkpoints.expect("the open job's").failure;
    assert!(failure == fault.to_string() && !failure.contains('\n'), "{failure:?}");
}

/// Once its successor has joined, a process of rank 0 can write, seal and discard no checkpoint.
#[test]
fn a_replaced_rank_0_touches_no_checkpoint() {
    let cluster = Cluster::start(1);
    let (spec, layout) = one_shard("replaced", 33);
    let server = loaded(&cluster, &spec, &layout);
    let newest = server.join("replaced", 0, INCARNATION.0 + 1);
    newest.expect("a join");
    let [old, new] = [0, 1].map(|after| Author::Rank(Incarnation(INCARNATION.0 + after)));
    let (job, name) = ("replaced".to_string(), "first".to_string());
    let write = |author: Author| {
        let request = v1::CheckpointRequest { job: job.clone(), name: name.clone(), ..Default::default() };
        server.call(server.admin.clone().checkpoint(author.sign(request)))
    };
    let seal = |author: Author, parts: Vec<String>| {
        let request = v1::SealCheckpointRequest { job: job.clone(), name: name.clone(), parts };
        server.call(server.admin.clone().seal_checkpoint(author.sign(request)))
    };
    let discard = |author: Author| {
        let request = v1::DiscardCheckpointRequest { job: job.clone(), name: name.clone() };
        server.call(server.admin.clone().discard_checkpoint(author.sign(request)))
    };
    assert_fault(write(old), Fenced, "incarnation", "7", "8");
    let part = write(new).expect("a part").part;
    assert_fault(seal(old, vec![part.clone()]), Fenced, "incarnation", "7", "8");
    assert_fault(discard(old), Fenced, "incarnation", "7", "8");
    seal(new, vec![part]).expect("the part is still there");
}

/// The second server of two cannot read its part. The first one must be left without a half-restored job. A job that
/// was open before must still be there.
#[test]
fn a_restore_that_fails_on_one_server_leaves_nothing_on_the_other() {
    const SECOND: &str = "server-00002-of-00002.safetensors";
    let cluster = Cluster::start(2);
    let (model, plan, addresses) = (Synthetic::default(), Scenario::exact(4), cluster.addresses());
    let spec = plan.spec("halved", &model);
    let mut first = run::enter(cluster.options(&spec, 0), &model, &plan);
    run::steps(&mut first, &model, &plan, 2, &mut run::Rank::default()).expect("steps");
    first.session().checkpoint("two").expect("a checkpoint");
    let expected = first.session().state_hash().expect("a hash");
    first.session().delete_job().expect("a deletion");
    let part = cluster.checkpoint("halved", "two").join(SECOND);
    flip(&part);
    let opened = || {
        let session = Session::connect(cluster.options(&spec, 0)).expect("a session");
        assert!(session.open().expect("an open").is_fresh());
        session
    };
    let check = |said: &str| {
        for words in [SECOND, "BLAKE3", "taken back", "restore it again", &addresses[0]] {
            assert!(said.contains(words), "{words:?} is missing in: {said}");
        }
        for server in 0..2 {
            let progress = cluster.raw(server).progress("halved");
            assert_eq!((progress.phase(), progress.restore.clone()), (Phase::Loading, None), "{progress:?}");
            assert!(!progress.missing_shards.is_empty(), "{progress:?}");
        }
    };
    let error = opened().restore("two").expect_err("a part is damaged");
    assert!(matches!(error, Error::NotRestored(_)), "{error:?}");
    check(&error.to_string());
    drop(opened());
    let restore =
        || longshore(["restore", "--servers", &addresses.join(","), "--job", "halved", "--name", "two"]);
    let refused = restore();
    assert_eq!(refused.code, 1, "{refused:?}");
    check(&refused.stderr);
    // A restore that opened the job itself must also delete the job.
    opened().delete_job().expect("a deletion");
    let refused = restore();
    assert!(refused.code == 1 && refused.stderr.contains(SECOND), "{refused:?}");
    assert!(
        (0..2).all(|server| cluster.raw(server).find("halved").is_err()),
        "a job without weights is left"
    );
    flip(&part);
    let session = opened();
    let restored = restore();
    assert_eq!((restored.code, restored.stdout.as_str()), (0, "restored two: version 2\n"), "{restored:?}");
    assert_eq!(session.state_hash().expect("a hash"), expected);
}

/// Inverts a byte of the state.
fn flip(path: &Path) {
    let file = OpenOptions::new().read(true).write(true).open(path).expect("a file");
    let mut byte = [0];
    file.read_exact_at(&mut byte, 65_536).expect("a byte");
    file.write_all_at(&[!byte[0]], 65_536).expect("a byte");
}
