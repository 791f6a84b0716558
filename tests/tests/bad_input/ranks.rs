//! Processes that must not train: one whose rank is taken, one whose hyperparameters are no numbers.

use longshore_proto::FaultKind::{Fenced, Invalid};
use longshore_tests::conformance::{
    cluster::Cluster,
    raw::{assert_fault, decision},
    run::{self, Rank},
    scenario::Scenario,
    synthetic::Synthetic,
};
use longshore_wire::v1;
use longshore_worker::{Error, Pipeline, Session};

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
