//! Runs a plan with servers, the worker library and one thread for each rank. The result is compared with the
//! reference loop's.

use std::collections::BTreeMap;

use longshore_proto::Version;
use longshore_worker::{Options, Pipeline, Session, StepOutcome};

use super::{
    cluster::Cluster,
    files,
    reference::{Step, Trace},
    scenario::{Batch, Model, Scenario},
};

/// The results of one rank.
#[derive(Default)]
pub struct Rank {
    pub losses: BTreeMap<u64, Vec<u32>>,
    pub outcomes: Vec<StepOutcome>,
    pub images: Vec<(u64, Vec<u8>)>,
}

/// Trains a fresh job to the end of the plan, one thread for each rank.
pub fn train(cluster: &Cluster, model: &dyn Model, plan: &Scenario, job: &str) -> Trace {
    let ranks: Vec<Rank> = std::thread::scope(|scope| {
        let start = |rank| scope.spawn(move || one_rank(cluster, model, plan, job, rank));
        let ranks: Vec<_> = (0..plan.world).map(start).collect();
        ranks.into_iter().map(|rank| rank.join().expect("a rank must not fail")).collect()
    });
    collect(cluster, model, plan, job, ranks)
}

/// Combines the ranks' results with the state in the checkpoint "end".
pub fn collect(cluster: &Cluster, model: &dyn Model, plan: &Scenario, job: &str, ranks: Vec<Rank>) -> Trace {
    let spec = plan.spec(job, model);
    let layout = spec.validate().expect("a valid spec");
    let applied = (0..cluster.addresses().len()).map(|server| cluster.raw(server).progress(job).applied);
    let applied: Vec<u64> = applied.collect();
    assert!(applied.iter().all(|&other| other == applied[0]), "the servers applied {applied:?} steps");
    for rank in &ranks[1..] {
        agree(&ranks[0], rank);
    }
    let steps = ranks[0].outcomes.iter().map(|outcome| {
        let losses = ranks.iter().flat_map(|rank| rank.losses[&outcome.step.0].clone()).collect();
        step(outcome, losses)
    });
    let state = files::read(&cluster.checkpoint(job, "end"), &layout);
    Trace { steps: steps.collect(), applied: applied[0], state, images: ranks[0].images.clone() }
}

/// Checks that another rank learned the same as the first rank from the commits. The overflowed element is not
/// compared.
fn agree(first: &Rank, other: &Rank) {
    assert_eq!(first.images, other.images, "images differ between ranks");
    assert_eq!(first.outcomes.len(), other.outcomes.len());
    for (a, b) in first.outcomes.iter().zip(&other.outcomes) {
        let seen = |outcome: &StepOutcome| {
            let StepOutcome { step, read, skip, clip_coefficient, loss_scale, loss_scale_next, .. } =
                *outcome;
            let norm = (!skip).then_some(outcome.norm);
            (step, read, skip, norm, clip_coefficient, loss_scale, loss_scale_next)
        };
        assert_eq!(seen(a), seen(b), "outcomes differ between ranks");
    }
}

fn step(outcome: &StepOutcome, losses: Vec<u32>) -> Step {
    Step {
        step: outcome.step.0,
        reads: outcome.read.0,
        scale: outcome.loss_scale,
        skip: outcome.skip,
        norm: (!outcome.skip).then_some(outcome.norm),
        clip_coefficient: outcome.clip_coefficient,
        scale_next: outcome.loss_scale_next,
        overflow: outcome.overflow.clone(),
        losses,
    }
}

fn one_rank(cluster: &Cluster, model: &dyn Model, plan: &Scenario, job: &str, rank: u32) -> Rank {
    let mut pipeline = enter(cluster.options(&plan.spec(job, model), rank), model, plan);
    let mut seen = Rank::default();
    steps(&mut pipeline, model, plan, plan.steps, &mut seen).expect("the steps");
    finish(pipeline, plan, seen)
}

/// Opens or finds the job, joins it and waits for its weights.
pub fn enter(options: Options, model: &dyn Model, plan: &Scenario) -> Pipeline {
    let mut session = Session::connect(options).expect("a connection");
    let joined = session.start(&|param| model.initial(param)).expect("a start");
    Pipeline::new(session, &joined, plan.pipeline()).expect("a pipeline")
}

/// Makes steps up to `last`, with the plan's evaluations.
pub fn steps(
    pipeline: &mut Pipeline,
    model: &dyn Model,
    plan: &Scenario,
    last: u64,
    seen: &mut Rank,
) -> anyhow::Result<()> {
    let rank = pipeline.session().rank().0;
    while pipeline.last_step().0 < last {
        let step = pipeline.begin()?;
        let losses = seen.losses.entry(step.step.0).or_default();
        losses.clear();
        for micro_step in 0..plan.micro_steps {
            let batch = Batch { step: step.step.0, micro_step, rank };
            let loss = model.micro_step(pipeline, step, batch)?;
            losses.push(loss.to_bits());
        }
        pipeline.finish(Vec::new())?;
        if plan.evaluates_after(step.step.0) {
            let version = pipeline.drain()?;
            seen.images.push((version.0, image(pipeline.session(), version)?));
        }
        seen.outcomes.extend(pipeline.outcomes());
    }
    Ok(())
}

/// Drains, takes the last image, and has rank 0 write the checkpoint "end".
pub fn finish(mut pipeline: Pipeline, plan: &Scenario, mut seen: Rank) -> Rank {
    let version = pipeline.drain().expect("a drain");
    assert_eq!(version.0, plan.steps);
    seen.outcomes.extend(pipeline.outcomes());
    seen.images.push((version.0, image(pipeline.session(), version).expect("the last image")));
    if pipeline.session().rank().0 == 0 {
        pipeline.session().checkpoint("end").expect("a checkpoint");
    }
    pipeline.close().and_then(Session::leave).expect("a clean end");
    seen
}

/// Returns the whole image of one version.
pub fn image(session: &Session, version: Version) -> longshore_worker::Result<Vec<u8>> {
    let whole = 0..session.layout().elements();
    let dtype = session.spec().image_dtype;
    let feed = session.pull(version, std::slice::from_ref(&whole))?;
    let mut bytes = vec![0; (whole.end * dtype.bytes()) as usize];
    feed.read_raw(whole, &mut bytes)?;
    Ok(bytes)
}

/// Trains the plan with servers and with the reference, and compares both traces.
#[track_caller]
pub fn check(cluster: &Cluster, model: &dyn Model, plan: &Scenario, job: &str) -> Trace {
    let (run, reference) = (train(cluster, model, plan, job), super::reference::train(model, plan));
    assert_trace(&run, &reference, model, plan, job);
    run
}

/// Compares two traces. Fields of steps come before whole arrays, and a failure names the first element that differs.
#[track_caller]
pub fn assert_trace(run: &Trace, reference: &Trace, model: &dyn Model, plan: &Scenario, job: &str) {
    let spec = plan.spec(job, model);
    let layout = spec.validate().expect("a valid spec");
    for (ours, theirs) in run.steps.iter().zip(&reference.steps) {
        assert_eq!(ours, theirs, "a step of the run, and as it must be");
    }
    assert_eq!(run.steps.len(), reference.steps.len(), "steps");
    assert_eq!(run.applied, reference.applied, "applied steps");
    let arrays = [
        ("master", &run.state.master, &reference.state.master),
        ("first moment", &run.state.first, &reference.state.first),
        ("second moment", &run.state.second, &reference.state.second),
    ];
    for (array, ours, theirs) in arrays {
        assert_eq!(ours.len(), theirs.len(), "{array}");
        let Some(at) = ours.iter().zip(theirs).position(|(a, b)| a != b) else { continue };
        let param = layout.param_at(at as u64).map_or("padding", |param| &spec.params[param].name);
        let count = ours.iter().zip(theirs).filter(|(a, b)| a != b).count();
        let (ours, theirs) = (f32::from_bits(ours[at]), f32::from_bits(theirs[at]));
        panic!("{array}: {count} elements differ, first flat {at} in {param}: {ours:e}, must be {theirs:e}");
    }
    for ((version, ours), (expected, theirs)) in run.images.iter().zip(&reference.images) {
        assert_eq!(version, expected, "version of an image");
        let at = ours.iter().zip(theirs).position(|(a, b)| a != b);
        assert!(at.is_none() && ours.len() == theirs.len(), "image of version {version}, byte {at:?}");
    }
    assert_eq!(run.images.len(), reference.images.len(), "images");
}
