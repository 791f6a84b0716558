//! All ranks and servers skip a step whose gradient overflows, and the loss scale follows its rule. At the smallest
//! scale a job waits for an operator, and loses nothing.

use std::{
    sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    time::Duration,
};

use longshore_proto::Dtype;
use longshore_tests::conformance::{
    cluster::{Cluster, DEADLINE, eventually},
    reference::{Reference, Trace},
    run::{self, Rank, assert_trace},
    scenario::{Model, Scale, Scenario},
    synthetic::{Spike, Synthetic},
};
use longshore_wire::v1::Phase;
use longshore_worker::{Error, LossScalerOptions};

/// "hot" lies in the second block, which only the second server has. "tail" reaches from there to the end.
fn model() -> Synthetic {
    let sizes = vec![("cool", vec![70_003], 0), ("hot", vec![5], 1), ("tail", vec![130_001], 0)];
    Synthetic { sizes, ..Synthetic::default() }
}

fn plan(steps: u64, options: LossScalerOptions) -> Scenario {
    let scale = Scale::Dynamic(options);
    Scenario { gradient: Dtype::F16, image: Dtype::F16, scale, clip: Some(1.0), ..Scenario::exact(steps) }
}

/// The loss scale begins at 2^40, where the gradients of both ranks overflow. In step 30 only rank 1 overflows.
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

/// The scale is 4, 2, then 1, the smallest one. Step 3 is the last before the pause.
const FLOOR: LossScalerOptions =
    LossScalerOptions { initial: 4.0, window: 1000, hysteresis: 1, consecutive_hysteresis: false, min: 1.0 };
const PAUSED_AT: u64 = 3;
const STEPS: u64 = 6;

/// A model whose gradients exceed f16's range at scale 1, but not at 0.5.
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

/// An operator's resume died after one of two servers. Rank 0 or its successor resumes the other server. Ranks that
/// gave up in the pause start again before or after the resume, and wait for its end too.
#[test]
fn a_resume_that_reached_one_server_reaches_the_other() {
    let cluster = Cluster::start(2);
    let cases = [
        ("live", &[][..], false, 0..1),
        ("after-first", &[0], false, 0..1),
        ("after-second", &[0], false, 1..2),
        ("back-before", &[0, 1], true, 0..2),
        ("back-before-first", &[0, 1], true, 0..1),
    ];
    for (job, dying, back_before, told) in cases {
        let (model, plan) = (too_hot(), floor_plan());
        let (gone, back, resumed) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicBool::new(false));
        let life = |rank: u32| {
            let mut seen = Rank::default();
            if dying.contains(&rank) {
                give_up(&cluster, &model, job, rank, &mut seen);
                gone.fetch_add(1, SeqCst);
                eventually("the operator", || (back_before || resumed.load(SeqCst)).then_some(()));
            }
            let mut pipeline = run::enter(cluster.options(&plan.spec(job, &model), rank), &model, &plan);
            back.fetch_add(usize::from(dying.contains(&rank)), SeqCst);
            run::steps(&mut pipeline, &model, &plan, STEPS, &mut seen).expect("steps after the resume");
            run::finish(pipeline, &plan, seen)
        };
        let mut ranks: Vec<Rank> = std::thread::scope(|scope| {
            let life = &life;
            let ranks: Vec<_> = (0..2).map(|rank| scope.spawn(move || life(rank))).collect();
            await_pause(&cluster, job);
            let waits_for = if back_before { &back } else { &gone };
            eventually("the ranks", || (waits_for.load(SeqCst) == dying.len()).then_some(()));
            assert!(ranks.iter().all(|rank| !rank.is_finished()), "every rank must wait for the operator");
            told.for_each(|server| cluster.raw(server).resume(job, PAUSED_AT, 0.5).expect("a resume"));
            resumed.store(true, SeqCst);
            ranks.into_iter().map(|rank| rank.join().expect("a rank")).collect()
        });
        // A rank that died in the paused step does not know its outcome.
        ranks.iter_mut().for_each(|rank| rank.outcomes.retain(|outcome| outcome.step.0 != PAUSED_AT));
        let trace = run::collect(&cluster, &model, &plan, job, ranks);
        let mut expected = expected(&model, 0.5);
        expected.steps.remove(PAUSED_AT as usize - 1);
        assert_trace(&trace, &expected, &model, &plan, job);
    }
}
