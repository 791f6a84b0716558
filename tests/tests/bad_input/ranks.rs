//! Processes that must not train: the rank is taken, hyperparameters are not numbers, or the version differs
//! from the other ranks'.

use std::time::Duration;

use longshore_proto::FaultKind::{Conflict, Fenced, Invalid};
use longshore_tests::conformance::{
    cluster::Cluster,
    raw::{assert_fault, decision},
    reference,
    run::{self, Rank, assert_trace},
    scenario::{Delay, Model, Scenario},
    synthetic::Synthetic,
};
use longshore_wire::v1;
use longshore_worker::{DelayCorrection, Error, Pipeline, Schedule, Session};

use super::{BEFORE, STEPS, Victim, finish, plan};

#[test]
fn a_rank_that_is_joined_again_fences_its_older_process() {
    let cluster = Cluster::start(2);
    let victim = Victim::start(&cluster, "joined-twice");
    let (model, plan) = (Synthetic::default(), plan());
    let newer = run::enter(cluster.options(&victim.spec, 0), &model, &plan);
    let old = victim.incarnation.0.to_string();
    let since = "which rank 0 has joined as since";
    for server in &victim.servers {
        let shard = server.describe(victim.job()).server;
        let late = v1::PushRequest { shard, ..victim.chunk() };
        assert_fault(server.push(late), Fenced, "incarnation", &old, since);
        let commit = decision(&victim.spec, BEFORE + 1);
        assert_fault(
            server.commit(victim.job(), victim.incarnation, &commit),
            Fenced,
            "incarnation",
            &old,
            "",
        );
        let join = server.join(victim.job(), 0, victim.incarnation.0);
        assert_fault(join, Fenced, "incarnation", &old, since);
    }
    assert_fault(victim.servers[0].join(victim.job(), 1, 1), Invalid, "rank", "1", "world size, 1");
    let Victim { mut pipeline, mut seen, .. } = victim;
    let error = run::steps(&mut pipeline, &model, &plan, STEPS, &mut Rank::default()).expect_err("fenced");
    assert!(matches!(error.downcast_ref(), Some(Error::Fenced(_))), "{error:?}");
    drop(pipeline);
    seen.outcomes.retain(|outcome| outcome.step.0 <= BEFORE);
    finish(&cluster, "joined-twice", newer, seen);
}

#[test]
fn hyperparameters_that_are_not_numbers_stop_the_trainer_and_not_the_job() {
    let cluster = Cluster::start(2);
    let Victim { spec, pipeline, mut seen, .. } = Victim::start(&cluster, "not-a-number");
    drop(pipeline);
    let (model, plan) = (Synthetic::default(), plan());
    let mut session = Session::connect(cluster.options(&spec, 0)).expect("a connection");
    let joined = session.start(&|_| unreachable!("the job has weights")).expect("a join");
    let mut options = plan.pipeline();
    options.hyper = std::sync::Arc::new(|step| {
        let mut hypers = Scenario::hypers(step.0);
        hypers[0].lr = f64::NAN;
        hypers
    });
    let mut pipeline = Pipeline::new(session, &joined, options).expect("a pipeline");
    let error = run::steps(&mut pipeline, &model, &plan, STEPS, &mut Rank::default()).expect_err("NaN");
    match error.downcast_ref() {
        Some(Error::Call(call)) => {
            assert_eq!(
                (call.fault.kind, call.fault.field.as_str()),
                (Invalid, "commit.groups[0].lr"),
                "{call}"
            );
        }
        _ => panic!("not a refused commit: {error:?}"),
    }
    drop(pipeline);
    let pipeline = run::enter(cluster.options(&spec, 0), &model, &plan);
    seen.outcomes.retain(|outcome| outcome.step.0 <= BEFORE);
    finish(&cluster, "not-a-number", pipeline, seen);
}

/// Rank 0 alone drains the pipeline after a step. Rank 0 then computes the next step with the newest version,
/// and the other rank with the version before.
#[test]
fn ranks_that_compute_with_different_versions_are_told_and_change_nothing() {
    const DRAINED: u64 = 3;
    let (cluster, job) = (Cluster::start(2), "drained-alone");
    let correction = DelayCorrection::LookAhead;
    let delay = Some(Delay { warmup: 1, drain_every: DRAINED, correction });
    let (model, plan) =
        (Synthetic::default(), Scenario { world: 2, delay, clip: Some(1.0), ..Scenario::exact(7) });
    let spec = plan.spec(job, &model);
    let alone = |rank: u32| {
        let mut options = cluster.options(&spec, rank);
        options.deadline = Duration::from_secs(3);
        let mut session = Session::connect(options).expect("a connection");
        let joined = session.start(&|param| model.initial(param)).expect("a start");
        let mut options = plan.pipeline();
        if rank != 0 {
            options.schedule = Schedule::delayed(1);
        }
        let mut pipeline = Pipeline::new(session, &joined, options).expect("a pipeline");
        let mut seen = Rank::default();
        run::steps(&mut pipeline, &model, &plan, DRAINED, &mut seen).expect("steps before the drain");
        // The run ends with this step: a gradient of the next one would count when the ranks begin anew.
        let error = run::steps(&mut pipeline, &model, &plan, DRAINED + 1, &mut Rank::default());
        let error = error.and_then(|()| pipeline.drain().map_err(Into::into));
        (seen, error.expect_err("the other rank computes with another version"))
    };
    let (seen, errors): (Vec<Rank>, Vec<anyhow::Error>) = std::thread::scope(|scope| {
        let alone = &alone;
        let ranks: Vec<_> = (0..2).map(|rank| scope.spawn(move || alone(rank))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("a rank")).unzip()
    });
    let mut told = 0;
    for (rank, error) in errors.iter().enumerate() {
        let Some(Error::Refused(refused)) = error.downcast_ref() else {
            // This rank waited for the refused rank.
            assert!(error.to_string().contains("rank"), "{error:?}");
            continue;
        };
        let (own, others) = if rank == 0 { (3, 2) } else { (2, 3) };
        assert_eq!(
            (refused.fault.kind, &*refused.fault.field),
            (Conflict, "push.reads_version"),
            "{refused}"
        );
        let message = refused.to_string();
        let other = 1 - rank;
        for words in [
            format!("is {own} (step 4, micro-step 0, rank {rank}"),
            format!("must be {others}, with which rank {other} computed"),
            "call flush on all ranks".to_string(),
        ] {
            assert!(message.contains(&words), "no {words:?} in: {message}");
        }
        told += 1;
    }
    assert!(told > 0, "nobody was told: {errors:?}");
    for server in 0..2 {
        assert_eq!(cluster.raw(server).progress(job).version, DRAINED, "server {server}");
    }
    // Ranks that agree continue to the bits of an undisturbed run.
    let go_on = |rank: u32, mut seen: Rank| {
        let mut pipeline = run::enter(cluster.options(&spec, rank), &model, &plan);
        run::steps(&mut pipeline, &model, &plan, plan.steps, &mut seen).expect("the job goes on");
        run::finish(pipeline, &plan, seen)
    };
    let seen: Vec<Rank> = std::thread::scope(|scope| {
        let go_on = &go_on;
        let ranks: Vec<_> =
            (0..2).zip(seen).map(|(rank, seen)| scope.spawn(move || go_on(rank, seen))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("a rank")).collect()
    });
    let trace = run::collect(&cluster, &model, &plan, job, seen);
    assert_trace(&trace, &reference::train(&model, &plan), &model, &plan, job);
}
