//! All ranks and servers skip a step whose gradient overflows, and the loss scale follows its rule. At the
//! floor a job waits for an operator without loss.

use std::{
    sync::atomic::{AtomicU64, Ordering::SeqCst},
    time::Duration,
};

use longshore_proto::{Commit, Dtype, FaultKind, Incarnation, JobSpec, limits::BLOCK_ELEMENTS};
use longshore_tests::conformance::{
    cluster::{Cluster, DEADLINE, eventually},
    raw::{self, At, assert_fault},
    reference::{self, Reference, Trace},
    run::{self, Rank, assert_trace},
    scenario::{Model, Scale, Scenario},
    synthetic::{Spike, Synthetic},
};
use longshore_wire::v1::{self, Phase};
use longshore_worker::{Error, LossScalerOptions, Pipeline};

/// "hot" lies in the second block, which only the second server has. "tail" reaches from there to the end.
fn model() -> Synthetic {
    let sizes = vec![("cool", vec![70_003], 0), ("hot", vec![5], 1), ("tail", vec![130_001], 0)];
    Synthetic { sizes, ..Synthetic::default() }
}

fn plan(steps: u64, options: LossScalerOptions) -> Scenario {
    let scale = Scale::Dynamic(options);
    Scenario { gradient: Dtype::F16, image: Dtype::F16, scale, clip: Some(1.0), ..Scenario::exact(steps) }
}

const HIGH: f64 = (1u64 << 20) as f64;

/// Worked out by hand from DeepSpeed's rule: first scale 2^20, window 3, hysteresis 2, floor 1. "hot" is 1
/// everywhere, and 2^16 takes it beyond f16's largest number, 65504. Step 19 also has a NaN.
///
/// (log2 of the scale used, skipped, log2 of the scale after, reason)
const EVENTS: [(u32, bool, u32); 20] = [
    (20, true, 20),  // 1: the hysteresis, 2, is down to 1
    (20, true, 19),  // 2
    (19, true, 18),  // 3: not refilled by a halving
    (18, true, 17),  // 4
    (17, true, 16),  // 5
    (16, true, 15),  // 6
    (15, false, 15), // 7: 0 clean steps before it since the overflow
    (15, false, 15), // 8: 1
    (15, false, 15), // 9: 2
    (15, false, 16), // 10: 3, a whole window: doubled, hysteresis 2 again
    (16, true, 16),  // 11: down to 1
    (16, true, 15),  // 12
    (15, false, 15), // 13: 0
    (15, false, 15), // 14: 1
    (15, false, 15), // 15: 2
    (15, false, 16), // 16: 3
    (16, true, 16),  // 17
    (16, true, 15),  // 18
    (15, true, 14),  // 19: the NaN; the hysteresis is still 1
    (14, false, 14), // 20: 0
];

#[test]
fn twenty_steps_by_hand_are_skipped_on_every_shard_or_on_none() {
    let spike = Spike { step: 19, rank: 0, param: 2, element: 7, value: f32::NAN };
    let model = Synthetic { constants: vec![(1, 1.0)], spikes: vec![spike], ..model() };
    let options = LossScalerOptions {
        initial: HIGH,
        window: 3,
        hysteresis: 2,
        consecutive_hysteresis: false,
        min: 1.0,
    };
    let (plan, cluster) = (plan(20, options), Cluster::start(2));
    let mut pipeline = run::enter(cluster.options(&plan.spec("by-hand", &model), 0), &model, &plan);
    let mut seen = Rank::default();
    let (mut before, mut applied) = (image(&pipeline, 0), 0);
    for (index, &(scale, skip, next)) in EVENTS.iter().enumerate() {
        let step = index as u64 + 1;
        run::steps(&mut pipeline, &model, &plan, step, &mut seen).expect("a step");
        let outcome = seen.outcomes.last().expect("a decided step");
        let found = (outcome.loss_scale, outcome.skip, outcome.loss_scale_next);
        assert_eq!(found, (2f64.powi(scale as i32), skip, 2f64.powi(next as i32)), "step {step}");
        let after = image(&pipeline, step);
        assert!(
            changed(&before, &after).iter().all(|&changed| changed != skip),
            "step {step} on some shards"
        );
        before = after;
        applied += u64::from(!skip);
        for server in 0..2 {
            let progress = cluster.raw(server).progress("by-hand");
            assert_eq!((progress.version, progress.applied), (step, applied), "server {server}");
        }
    }
    let named = |step: usize| seen.outcomes[step - 1].overflow.clone();
    assert_eq!(named(6).as_deref(), Some("hot, element 0"));
    assert_eq!(named(19).as_deref(), Some("tail, element 7"));
    assert_eq!(named(20), None);
    let seen = run::finish(pipeline, &plan, seen);
    let trace = run::collect(&cluster, &model, &plan, "by-hand", vec![seen]);
    assert_trace(&trace, &reference::train(&model, &plan), &model, &plan, "by-hand");
}

/// No gradient of two ranks survives the first scale, 2^40. At the end one rank overflows alone.
#[test]
fn one_ranks_overflow_skips_the_step_for_all() {
    let spike = Spike { step: 30, rank: 1, param: 0, element: 65_000, value: f32::INFINITY };
    let model = Synthetic { constants: vec![(1, 1.0)], spikes: vec![spike], ..model() };
    let options = LossScalerOptions { initial: 2f64.powi(40), hysteresis: 1, ..LossScalerOptions::default() };
    let plan = Scenario { world: 2, micro_steps: 2, ..plan(31, options) };
    let trace = run::check(&Cluster::start(2), &model, &plan, "forty");
    let skipped: Vec<u64> = trace.steps.iter().filter(|step| step.skip).map(|step| step.step).collect();
    // Two micro-steps of two ranks are summed in fp32, so only each contribution must stay in f16's range.
    // The 25 scales from 2^40 to 2^16 overflow.
    assert_eq!(skipped, (1..=25).chain([30]).collect::<Vec<_>>());
    assert_eq!(trace.steps[29].overflow.as_deref(), Some("cool, element 65000"));
}

fn image(pipeline: &Pipeline, version: u64) -> Vec<u8> {
    run::image(pipeline.session(), longshore_proto::Version(version)).expect("an image")
}

/// Returns whether each shard has changed. A shard has one block here.
fn changed(before: &[u8], after: &[u8]) -> Vec<bool> {
    let shard = 2 * BLOCK_ELEMENTS as usize;
    before.chunks(shard).zip(after.chunks(shard)).map(|(before, after)| before != after).collect()
}

// ---- the floor ----------------------------------------------------------------------------------------------------

/// Scale 4, 2, then 1, which is the floor: step 3 is the last before the pause.
const FLOOR: LossScalerOptions =
    LossScalerOptions { initial: 4.0, window: 1000, hysteresis: 1, consecutive_hysteresis: false, min: 1.0 };
const PAUSED_AT: u64 = 3;
const STEPS: u64 = 6;

/// A model beyond f16's range at scale 1, and within it at 0.5.
fn too_hot() -> Synthetic {
    Synthetic { constants: vec![(1, 70_000.0)], ..model() }
}

/// A model with bad data in the first three steps of rank 1.
fn bad_data() -> Synthetic {
    let spike = |step| Spike { step, rank: 1, param: 2, element: 11, value: f32::NEG_INFINITY };
    Synthetic { spikes: (1..=PAUSED_AT).map(spike).collect(), ..model() }
}

fn floor_plan() -> Scenario {
    Scenario { world: 2, ..plan(STEPS, FLOOR) }
}

/// Returns the expected trace after an operator's `scale` in the pause; 0 keeps the old scale.
fn expected(model: &dyn Model, scale: f64) -> Trace {
    let mut reference = Reference::new(model, floor_plan());
    (0..PAUSED_AT).for_each(|_| reference.step());
    if scale > 0.0 {
        reference.choose_scale(scale);
    }
    (PAUSED_AT..STEPS).for_each(|_| reference.step());
    reference.end()
}

/// Waits until all servers report the pause. Returns its reason.
fn await_pause(cluster: &Cluster, job: &str) -> String {
    let paused = |server: usize| {
        eventually("a pause", || {
            // The ranks may not have opened the job yet.
            let progress = cluster.raw(server).find(job).ok()?.progress?;
            (progress.phase() == Phase::Paused).then_some(progress)
        })
    };
    let (first, second) = (paused(0), paused(1));
    assert_eq!((first.version, first.applied), (PAUSED_AT, 0));
    assert_eq!((first.pause_reason.as_str(), first.version), (second.pause_reason.as_str(), second.version));
    first.pause_reason
}

fn resume(cluster: &Cluster, job: &str, scale: f64) {
    (0..2).for_each(|server| cluster.raw(server).resume(job, PAUSED_AT, scale).expect("a resume"));
}

#[test]
fn at_the_floor_the_job_pauses_names_the_tensor_and_goes_on_when_told() {
    let cases: [(&str, Synthetic, f64, &str); 2] = [
        ("new-scale", too_hot(), 0.5, "hot, element 0"),
        ("cause-removed", bad_data(), 0.0, "tail, element 11"),
    ];
    let (cluster, plan) = (Cluster::start(2), floor_plan());
    for (job, model, scale, tensor) in cases {
        let model = &model;
        let trace = std::thread::scope(|scope| {
            let training = scope.spawn(|| run::train(&cluster, model, &plan, job));
            let reason = await_pause(&cluster, job);
            for part in ["step 3", tensor, "smallest loss scale, 1", "longshore resume"] {
                assert!(reason.contains(part), "{part:?} is not in {reason:?}");
            }
            std::thread::sleep(Duration::from_millis(300));
            assert!(!training.is_finished(), "the pipeline must wait for the operator");
            assert_eq!(cluster.raw(0).progress(job).version, PAUSED_AT);
            resume(&cluster, job, scale);
            training.join().expect("the run ends well")
        });
        assert_trace(&trace, &expected(model, scale), model, &plan, job);
        let scales: Vec<f64> = trace.steps.iter().map(|step| step.scale).collect();
        let on = if scale > 0.0 { scale } else { 1.0 };
        assert_eq!(scales, [4.0, 2.0, 1.0, on, on, on]);
    }
}

// ---- workers that die in the pause --------------------------------------------------------------------------------

/// The ranks that give up in the pause and start again, and whether they do so before the operator's resume.
struct Deaths {
    ranks: &'static [u32],
    rejoin_first: bool,
}

#[test]
fn a_worker_that_starts_again_in_a_pause_waits_for_the_resume_too() {
    let cluster = Cluster::start(2);
    let cases = [
        ("rank-1", Deaths { ranks: &[1], rejoin_first: true }),
        ("rank-0", Deaths { ranks: &[0], rejoin_first: true }),
        ("both", Deaths { ranks: &[0, 1], rejoin_first: true }),
        ("rank-0-late", Deaths { ranks: &[0], rejoin_first: false }),
        ("both-late", Deaths { ranks: &[0, 1], rejoin_first: false }),
    ];
    for (job, deaths) in cases {
        let trace = deadly_pause(&cluster, job, &deaths);
        let (model, plan) = (too_hot(), floor_plan());
        let mut expected = expected(&model, 0.5);
        expected.steps.remove(PAUSED_AT as usize - 1);
        assert_trace(&trace, &expected, &model, &plan, job);
    }
}

fn deadly_pause(cluster: &Cluster, job: &str, deaths: &Deaths) -> Trace {
    let (model, plan) = (too_hot(), floor_plan());
    let (dead, back, resumed) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    let life = |rank: u32| {
        let mut seen = Rank::default();
        if deaths.ranks.contains(&rank) {
            give_up(cluster, &model, job, rank, &mut seen);
            dead.fetch_add(1, SeqCst);
            let may_join = || (deaths.rejoin_first || resumed.load(SeqCst) == 1).then_some(());
            eventually("the operator", may_join);
        }
        let mut pipeline = run::enter(cluster.options(&plan.spec(job, &model), rank), &model, &plan);
        back.fetch_add(u64::from(deaths.ranks.contains(&rank)), SeqCst);
        run::steps(&mut pipeline, &model, &plan, STEPS, &mut seen).expect("steps after the resume");
        run::finish(pipeline, &plan, seen)
    };
    let mut ranks: Vec<Rank> = std::thread::scope(|scope| {
        let life = &life;
        let ranks: Vec<_> = (0..2).map(|rank| scope.spawn(move || life(rank))).collect();
        await_pause(cluster, job);
        let all = deaths.ranks.len() as u64;
        eventually("the deaths", || (dead.load(SeqCst) == all).then_some(()));
        if deaths.rejoin_first {
            eventually("the second lives", || (back.load(SeqCst) == all).then_some(()));
            std::thread::sleep(Duration::from_millis(300));
        }
        assert!(ranks.iter().all(|rank| !rank.is_finished()), "every rank must wait for the operator");
        let progress = cluster.raw(0).progress(job);
        assert_eq!((progress.phase(), progress.version), (Phase::Paused, PAUSED_AT));
        resume(cluster, job, 0.5);
        resumed.store(1, SeqCst);
        ranks.into_iter().map(|rank| rank.join().expect("a rank")).collect()
    });
    // A rank that died in that step does not know its outcome.
    ranks.iter_mut().for_each(|rank| rank.outcomes.retain(|outcome| outcome.step.0 != PAUSED_AT));
    run::collect(cluster, &model, &plan, job, ranks)
}

/// Runs a worker with a short deadline. The worker gives up with a typed error that names the reason, and the
/// job remains.
fn give_up(cluster: &Cluster, model: &Synthetic, job: &str, rank: u32, seen: &mut Rank) {
    let plan = floor_plan();
    let mut options = cluster.options(&plan.spec(job, model), rank);
    options.pause_deadline = Duration::from_millis(400);
    assert!(options.pause_deadline < DEADLINE);
    let mut pipeline = run::enter(options, model, &plan);
    let error = run::steps(&mut pipeline, model, &plan, STEPS, seen).expect_err("the pause is too long");
    match error.downcast_ref::<Error>() {
        Some(Error::StillPaused(paused)) => {
            assert_eq!(paused.job.as_str(), job);
            assert!(paused.reason.contains("hot, element 0"), "{}", paused.reason);
            assert!(paused.waited >= Duration::from_millis(400), "{:?}", paused.waited);
        }
        _ => panic!("not a pause that was too long: {error:?}"),
    }
    assert_eq!(cluster.raw(1).progress(job).phase(), Phase::Paused, "the job is still there");
}

// ---- decisions and resumes that reach one server only ---------------------------------------------------------------

/// Rank 0 decided the pause and died between two servers. The pause comes to the other server with the
/// decision.
#[test]
fn a_decision_that_reached_one_server_pauses_the_other_as_well() {
    let (cluster, model, job) = (Cluster::start(2), model(), "half-decided");
    let plan = plan(STEPS, FLOOR);
    let spec = plan.spec(job, &model);
    let mut pipeline = run::enter(cluster.options(&spec, 0), &model, &plan);
    let mut seen = Rank::default();
    run::steps(&mut pipeline, &model, &plan, PAUSED_AT - 1, &mut seen).expect("steps");
    drop(pipeline);
    decide_on_first(&cluster, &spec, "step 3 overflowed");
    // Either server refuses a client that ignores the pause, as soon as that server has the decision.
    let early = cluster.raw(0).push(next_chunk(&cluster, &spec, 0, PAUSED_AT + 1));
    assert_fault(early, FaultKind::Precondition, "job.phase", "paused", "training");
    std::thread::scope(|scope| {
        let training = scope.spawn(|| {
            let mut pipeline = run::enter(cluster.options(&spec, 0), &model, &plan);
            run::steps(&mut pipeline, &model, &plan, STEPS, &mut seen).expect("steps after the resume");
        });
        for server in 0..2 {
            let progress = eventually("a pause", || {
                let progress = cluster.raw(server).progress(job);
                (progress.phase() == Phase::Paused && progress.version == PAUSED_AT).then_some(progress)
            });
            assert_eq!(progress.pause_reason, "step 3 overflowed");
        }
        std::thread::sleep(Duration::from_millis(200));
        assert!(!training.is_finished() && cluster.raw(0).progress(job).version == PAUSED_AT);
        resume(&cluster, job, 0.0);
    });
    assert_eq!(cluster.raw(1).progress(job).version, STEPS);
}

/// Returns a valid chunk of zeros.
fn next_chunk(cluster: &Cluster, spec: &JobSpec, shard: u32, step: u64) -> v1::PushRequest {
    let described = cluster.raw(0).describe(spec.name.as_str());
    let incarnation = Incarnation(described.ranks[0].incarnation);
    let layout = spec.validate().expect("a spec");
    let loss_scale =
        described.progress.and_then(|progress| progress.last_commit).expect("a commit").loss_scale;
    v1::PushRequest { loss_scale, ..raw::chunk(spec, &layout, shard, At { step, rank: 0, incarnation }) }
}

/// Pushes step 3 everywhere, and decides it on the first server alone.
fn decide_on_first(cluster: &Cluster, spec: &JobSpec, reason: &str) {
    let job = spec.name.as_str();
    for shard in 0..spec.validate().expect("a spec").shards() {
        let server = cluster.raw(shard as usize % 2);
        assert_eq!(server.push(next_chunk(cluster, spec, shard, PAUSED_AT)), Ok(false));
    }
    let server = cluster.raw(0);
    (0..2).for_each(|server| cluster.raw(server).await_stats(job, PAUSED_AT));
    let described = server.describe(job);
    let before = described.progress.and_then(|progress| progress.last_commit).expect("a commit");
    let decided = Commit {
        skip: true,
        gradient_scale: before.loss_scale,
        loss_scale: before.loss_scale,
        trainer_state: before.trainer_state.to_vec(),
        pause_reason: reason.into(),
        ..raw::decision(spec, PAUSED_AT)
    };
    let incarnation = Incarnation(described.ranks[0].incarnation);
    assert_eq!(server.commit(job, incarnation, &decided), Ok(false));
}

/// An operator's command died halfway. Rank 0 or its successor completes it on the other server.
#[test]
fn a_resume_that_reached_one_server_reaches_the_other() {
    let cluster = Cluster::start(2);
    for (job, rank_0_dies, resumed) in
        [("live", false, 0), ("after-first", true, 0), ("after-second", true, 1)]
    {
        let (model, plan) = (too_hot(), floor_plan());
        let told = std::sync::Barrier::new(2);
        let mut ranks: Vec<Rank> = std::thread::scope(|scope| {
            let (told, model, plan, cluster) = (&told, &model, &plan, &cluster);
            let life = move |rank: u32| {
                let mut seen = Rank::default();
                if rank == 0 && rank_0_dies {
                    give_up(cluster, model, job, rank, &mut seen);
                    told.wait();
                    told.wait();
                }
                let mut pipeline = run::enter(cluster.options(&plan.spec(job, model), rank), model, plan);
                run::steps(&mut pipeline, model, plan, STEPS, &mut seen).expect("steps after the resume");
                run::finish(pipeline, plan, seen)
            };
            let ranks: Vec<_> = (0..2).map(|rank| scope.spawn(move || life(rank))).collect();
            await_pause(cluster, job);
            if rank_0_dies {
                told.wait();
            }
            cluster.raw(resumed).resume(job, PAUSED_AT, 0.5).expect("a resume");
            if rank_0_dies {
                told.wait();
            }
            ranks.into_iter().map(|rank| rank.join().expect("a rank")).collect()
        });
        ranks.iter_mut().for_each(|rank| rank.outcomes.retain(|outcome| outcome.step.0 != PAUSED_AT));
        let trace = run::collect(&cluster, &model, &plan, job, ranks);
        let mut expected = expected(&model, 0.5);
        expected.steps.remove(PAUSED_AT as usize - 1);
        assert_trace(&trace, &expected, &model, &plan, job);
    }
}
