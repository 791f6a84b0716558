//! Decisions that a server must refuse.

use longshore_proto::{Commit, Correction, FaultKind, Hyper, Incarnation, ShardId, Step, Version};

use super::{Cluster, Expected, Midway, check, commit, common::cluster::store, small, weights};

use FaultKind::{Conflict, Invalid, Precondition};

type Case = (fn(&mut Commit), Expected);
type Change = (&'static str, fn(&mut Commit));

const ZERO_TO_ONE: &[&str] = &["in [0, 1)", "correct the hyperparameter"];
const AT_LEAST_0: &[&str] = &["finite and at least 0", "correct the hyperparameter"];

const CASES: &[Case] = &[
    (|c| c.step = Step(0), (Invalid, "commit.step", &["is 0", "at least 1"])),
    (
        |c| c.step = Step(3),
        (Precondition, "commit.step", &["is 3", "2, the next undecided step", "in order"]),
    ),
    (|c| c.gradient_scale = 0.0, (Invalid, "commit.gradient_scale", &["is 0", "1e-30 to 1e40"])),
    (|c| c.gradient_scale = 1e-31, (Invalid, "commit.gradient_scale", &["1e-30 to 1e40"])),
    (|c| c.gradient_scale = 1e41, (Invalid, "commit.gradient_scale", &["1e-30 to 1e40"])),
    (|c| c.gradient_scale = f64::NAN, (Invalid, "commit.gradient_scale", &["NaN"])),
    (|c| c.gradient_scale = f64::INFINITY, (Invalid, "commit.gradient_scale", &["inf"])),
    (|c| c.clip_coefficient = 0.0, (Invalid, "commit.clip_coefficient", &["is 0", "in (0, 1]"])),
    (|c| c.clip_coefficient = f64::NAN, (Invalid, "commit.clip_coefficient", &["NaN"])),
    (|c| c.clip_coefficient = 1.5, (Invalid, "commit.clip_coefficient", &["1.5"])),
    (|c| c.loss_scale = 0.0, (Invalid, "commit.loss_scale", &["finite and above 0"])),
    (|c| c.loss_scale = f64::NAN, (Invalid, "commit.loss_scale", &["NaN"])),
    (
        |c| c.correction = Correction::LookAhead(vec![0.1, 0.1]),
        (Invalid, "commit.look_ahead", &["given", "max_delay 0"]),
    ),
    (|c| c.groups.truncate(1), (Invalid, "commit.groups", &["is 1", "2, the job's number of param groups"])),
    (|c| c.groups.push(Hyper::default()), (Invalid, "commit.groups", &["is 3"])),
    (|c| c.groups.clear(), (Invalid, "commit.groups", &["is 0"])),
    (
        |c| c.trainer_state = vec![0; (1 << 20) + 1],
        (Invalid, "commit.trainer_state", &["1048577", "at most 1048576"]),
    ),
    (
        |c| c.pause_reason = "x".repeat(4097),
        (Invalid, "commit.pause_reason", &["4097 bytes", "at most 4096 bytes"]),
    ),
    (|c| c.groups[0].lr = f64::NAN, (Invalid, "commit.groups[0].lr", AT_LEAST_0)),
    (|c| c.groups[1].lr = -1e-3, (Invalid, "commit.groups[1].lr", &["-0.001", "at least 0"])),
    (|c| c.groups[0].lr = f64::INFINITY, (Invalid, "commit.groups[0].lr", AT_LEAST_0)),
    (|c| c.groups[0].beta1 = 1.0, (Invalid, "commit.groups[0].beta1", ZERO_TO_ONE)),
    (|c| c.groups[0].beta1 = f64::NAN, (Invalid, "commit.groups[0].beta1", ZERO_TO_ONE)),
    (|c| c.groups[1].beta2 = -0.1, (Invalid, "commit.groups[1].beta2", ZERO_TO_ONE)),
    (|c| c.groups[1].beta2 = f64::NAN, (Invalid, "commit.groups[1].beta2", ZERO_TO_ONE)),
    (|c| c.groups[0].eps = -1e-8, (Invalid, "commit.groups[0].eps", AT_LEAST_0)),
    (|c| c.groups[0].eps = f64::NAN, (Invalid, "commit.groups[0].eps", AT_LEAST_0)),
    (|c| c.groups[0].weight_decay = -0.1, (Invalid, "commit.groups[0].weight_decay", AT_LEAST_0)),
    (|c| c.groups[0].weight_decay = f64::NAN, (Invalid, "commit.groups[0].weight_decay", AT_LEAST_0)),
    (|c| c.groups[0].momentum = -0.1, (Invalid, "commit.groups[0].momentum", &["-0.1", "at least 0"])),
    (|c| c.groups[0].dampening = f64::NAN, (Invalid, "commit.groups[0].dampening", &["finite"])),
    (|c| c.groups[0].lr_decay = -1.0, (Invalid, "commit.groups[0].lr_decay", AT_LEAST_0)),
    (|c| c.groups[0].lr_decay = f64::NAN, (Invalid, "commit.groups[0].lr_decay", AT_LEAST_0)),
    (|c| c.groups[0].momentum_decay = -1.0, (Invalid, "commit.groups[0].momentum_decay", AT_LEAST_0)),
    // Step 1 is decided. The same commit is acknowledged again, but a different one is refused.
    (
        |c| c.step = Step(1),
        (Conflict, "commit.loss_scale", &["another value for step 1", "as first decided"]),
    ),
    // The commit is right. Rank 1's last micro-step is incomplete, with only the first chunk of shard 0.
    (
        |_| (),
        (
            Precondition,
            "commit.step",
            &["is 2", "missing: step 2, micro-step 1, shard", "rank 1", "Training.Stats"],
        ),
    ),
];

#[test]
fn bad_commits_are_refused_and_change_nothing() {
    let midway = Midway::new();
    let before = midway.view();
    for (change, expected) in CASES {
        let mut decision = Commit { loss_scale: 2.0, ..commit(&midway.cluster.spec, 2) };
        change(&mut decision);
        for job in &midway.cluster.jobs {
            let fault = job.commit(midway.cluster.incarnations[0], decision.clone()).unwrap_err();
            check(&fault, *expected);
            assert!(!fault.limit.contains("rank 0"), "rank 0 has sent all: {fault}");
        }
        assert_eq!(midway.view(), before);
    }
    midway.finish();
}

#[test]
fn a_step_is_decided_once() {
    let spec = small();
    let mut cluster = Cluster::started(&spec, 2, &weights(&spec, 1));
    let flats: Vec<_> = (0..4).map(|seed| super::gradient(&spec, seed, 1.0)).collect();
    let decision = Commit { trainer_state: vec![1], ..commit(&spec, 1) };
    cluster.step(&flats, &decision);
    let hash = cluster.hash();
    assert_eq!(cluster.commit(&decision), Ok(vec![true, true]));
    assert_eq!(cluster.commit(&Commit { norm: 3.0, ..decision.clone() }), Ok(vec![true, true]));
    let others: [Change; 7] = [
        ("commit.skip", |c| c.skip = true),
        ("commit.gradient_scale", |c| c.gradient_scale = 8.0),
        ("commit.clip_coefficient", |c| c.clip_coefficient = 0.5),
        ("commit.groups", |c| c.groups[1].lr = 1.0),
        ("commit.loss_scale", |c| c.loss_scale = 2.0),
        ("commit.trainer_state", |c| c.trainer_state = vec![2]),
        ("commit.pause_reason", |c| c.pause_reason = "why".into()),
    ];
    for (field, change) in others {
        let mut other = decision.clone();
        change(&mut other);
        let fault = cluster.commit(&other).unwrap_err();
        check(&fault, (Conflict, field, &["another value for step 1", "decided once"]));
    }
    assert_eq!(cluster.hash(), hash);
    // A server keeps eight decisions. The ninth makes the server forget the first.
    (2..10).for_each(|step| cluster.step(&flats, &commit(&spec, step)));
    let fault = cluster.commit(&decision).unwrap_err();
    check(&fault, (Precondition, "commit.step", &["is 1", "the job is at version 9", "join again"]));
    let fault = cluster.jobs[0].statistics(ShardId(0), Step(9)).unwrap_err();
    check(&fault, (Precondition, "step", &["is 9", "undecided", "version 9"]));
    let fault = cluster.jobs[0].statistics(ShardId(0), Step(11)).unwrap_err();
    check(&fault, (Precondition, "step", &["is 11", "at most 10"]));
}

/// Rank 0 must skip a step in which servers found an overflow, and must divide by the loss scale.
#[test]
fn a_decision_must_fit_its_gradient() {
    for spec in [small(), longshore_proto::JobSpec { world_size: 1, micro_steps: 1, ..small() }] {
        let mut cluster = Cluster::started(&spec, 2, &weights(&spec, 1));
        let contributions = spec.contributions(spec.world_size);
        let mut flats: Vec<_> = (0..contributions).map(|seed| super::gradient(&spec, seed, 1.0)).collect();
        cluster.step(&flats, &Commit { loss_scale: 1.0, ..commit(&spec, 1) });
        // The NaN is element 100 of the flat space, in shard 0.
        flats[0][400..404].copy_from_slice(&f32::NAN.to_le_bytes());
        cluster.push(2, &flats);
        let hash = cluster.hash();
        let sound = Commit { skip: true, ..commit(&spec, 2) };
        let owner = cluster.owner(ShardId(0));
        let decide = |decision: &Commit| {
            cluster.jobs[owner].commit(cluster.incarnations[0], decision.clone()).unwrap_err()
        };
        let applied = decide(&Commit { skip: false, ..sound.clone() });
        check(
            &applied,
            (Conflict, "commit.skip", &["true, since element 100 of shard 0", "first_nonfinite"]),
        );
        for wrong in [1.0 + contributions as f64, contributions as f64 * 1024.0] {
            let fault = decide(&Commit { gradient_scale: wrong, ..sound.clone() });
            let limit = format!("1 x {contributions}, the step's loss scale x world size");
            check(&fault, (Conflict, "commit.gradient_scale", &["step 2"]));
            assert!(fault.limit.starts_with(&limit), "{fault}");
        }
        assert_eq!(cluster.hash(), hash);
        cluster.commit(&sound).unwrap();
        cluster.work();
        assert_eq!(cluster.jobs[owner].progress().applied, 1);
    }
}

#[test]
fn a_reason_to_pause_is_short() {
    let midway = Midway::new();
    let fault = midway.cluster.jobs[0].protocol.pause(Incarnation(1), &"x".repeat(4097)).unwrap_err();
    check(&fault, (Invalid, "reason", &["4097 bytes", "at most 4096"]));
    midway.finish();
}

/// The server also refuses requests of a client that ignores the pause. The client may send them again afterwards.
#[test]
fn a_paused_job_takes_nothing_later_and_gives_all_there_is() {
    let midway = Midway::new();
    let spec = midway.cluster.spec.clone();
    let (first, second) = (midway.first.clone(), midway.second.clone());
    let mut reference = super::Reference::new(&spec, &weights(&spec, 1));
    reference.step(&first, &commit(&spec, 1));
    let mut cluster = midway.cluster;
    let pausing = Commit { pause_reason: "step 2 overflowed".into(), ..commit(&spec, 2) };
    cluster.step(&second, &pausing);
    reference.step(&second, &pausing);
    let chunk = |cluster: &Cluster, step| {
        let (chunk, payload) = cluster.chunks(step, 0, 0, &first[0])[0];
        store(&cluster.jobs[0], &chunk, payload)
    };
    let paused: Expected =
        (Precondition, "job.phase", &["is paused", "must be training", "step 2 overflowed"]);
    let before = format!("{:?} {:?}", cluster.jobs[0].progress(), cluster.jobs[0].protocol.pauses());
    check(&chunk(&cluster, 3).unwrap_err(), paused);
    assert_eq!(chunk(&cluster, 2), Ok(longshore_engine::step::Admission::Decided));
    check(&cluster.commit(&commit(&spec, 3)).unwrap_err(), paused);
    assert_eq!(cluster.commit(&pausing), Ok(vec![true, true]), "what paused it, once more");
    assert_eq!(format!("{:?} {:?}", cluster.jobs[0].progress(), cluster.jobs[0].protocol.pauses()), before);
    assert_eq!(cluster.hash(), reference.hash());
    assert!(cluster.image(ShardId(0), 2).unwrap().is_some());
    assert!(cluster.jobs[0].statistics(ShardId(0), Step(3)).unwrap().is_none());
    for job in &cluster.jobs {
        assert_eq!(job.protocol.resume(Some(Version(2)), 8.0), Ok(true));
        assert_eq!(job.protocol.resume(Some(Version(2)), 8.0), Ok(true), "the same again");
        assert_eq!(job.protocol.resume(Some(Version(2)), 0.0), Ok(true), "or with what counts");
        let fault = job.protocol.resume(Some(Version(2)), 4.0).unwrap_err();
        check(&fault, (Conflict, "loss_scale", &["is 4", "8, with which the job was resumed already"]));
        let last = job.progress().last_commit.unwrap();
        assert_eq!((last.loss_scale, last.pause_reason.as_str()), (8.0, ""));
        assert_eq!(job.protocol.commits_after(Step(1)), Some(vec![last]));
    }
    let fault = chunk(&cluster, 3).unwrap_err();
    check(&fault, (Conflict, "loss_scale", &["is 1 (step 3", "must be 8, that of the version"]));
    assert_eq!(cluster.commit(&pausing), Ok(vec![true, true]), "a late copy is still the same one");
}
