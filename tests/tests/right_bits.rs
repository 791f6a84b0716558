//! Every bit of a run equals the reference loop's: master weights, moments, images, losses, norms.

use std::sync::Arc;

use longshore_proto::Dtype;
use longshore_tests::conformance::{
    cluster::Cluster,
    gpt::Bytes,
    run::check,
    scenario::{Delay, Scale, Scenario},
    synthetic::Synthetic,
};
use longshore_worker::{DelayCorrection, HostDevice, LossScalerOptions};

/// Runs every combination of dtype, ranks, micro-steps and clipping over two servers.
#[test]
fn exact_steps_have_the_bits_of_a_plain_loop() {
    let (cluster, model) = (Cluster::start(2), Synthetic::default());
    for dtype in [Dtype::F16, Dtype::Bf16] {
        for world in [1, 2] {
            for micro_steps in [1, 4] {
                for clip in [None, Some(1.0)] {
                    let scale = Scale::Fixed(if dtype == Dtype::F16 { 1024.0 } else { 1.0 });
                    let plan = Scenario { world, micro_steps, clip, scale, ..Scenario::exact(5) };
                    let plan = Scenario { gradient: dtype, image: dtype, ..plan };
                    let job = format!("{dtype}-{world}-{micro_steps}-{}", clip.is_some());
                    let trace = check(&cluster, &model, &plan, &job);
                    // The clip coefficient must have an effect exactly where clipping is on, and no step may be
                    // skipped.
                    assert_eq!(trace.steps[0].clip_coefficient < 1.0, clip.is_some());
                    assert!(trace.steps.iter().all(|step| !step.skip && step.norm > Some(0.0)));
                }
            }
        }
    }
}

/// Gradients and images have different types, shards have several chunks, and the clip seldom clips.
#[test]
fn mixed_types_and_large_shards_have_the_bits_of_a_plain_loop() {
    let (cluster, model) = (Cluster::start(1), Synthetic::default());
    let cases = [(Dtype::F32, Dtype::F32), (Dtype::F16, Dtype::Bf16), (Dtype::Bf16, Dtype::F32)];
    for (gradient, image) in cases {
        let plan =
            Scenario { gradient, image, world: 2, clip: Some(92.0), shard_blocks: 5, ..Scenario::exact(5) };
        check(&cluster, &model, &plan, &format!("mixed-{gradient}-{image}"));
    }
}

#[test]
fn weights_pulled_on_demand_give_the_same_bits() {
    let (cluster, model) = (Cluster::start(2), Synthetic::default());
    let whole = Scenario { world: 2, micro_steps: 2, clip: Some(1.0), ..Scenario::exact(5) };
    let staged = Scenario { on_demand: true, ..whole };
    assert_eq!(check(&cluster, &model, &whole, "whole"), check(&cluster, &model, &staged, "staged"));
    let delay = Some(Delay { warmup: 2, drain_every: 4, correction: DelayCorrection::LookAhead });
    check(&cluster, &model, &Scenario { delay, steps: 9, ..staged }, "staged-delayed");
}

/// Covers warm-up, delayed steps, evaluations that drain, and the end, with every correction.
#[test]
fn delayed_steps_have_the_bits_of_a_plain_delayed_loop() {
    let (cluster, model) = (Cluster::start(2), Synthetic::default());
    let corrections = [("plain", 1, DelayCorrection::None), ("ahead", 2, DelayCorrection::LookAhead)];
    for (name, world, correction) in corrections {
        let delay = Some(Delay { warmup: 3, drain_every: 5, correction });
        let plan = Scenario { delay, world, clip: Some(1.0), ..Scenario::exact(13) };
        let trace = check(&cluster, &model, &plan, name);
        let reads: Vec<u64> = trace.steps.iter().map(|step| step.reads).collect();
        assert_eq!(reads, [0, 1, 2, 2, 3, 5, 5, 6, 7, 8, 10, 10, 11]);
        let evaluated: Vec<u64> = trace.images.iter().map(|(version, _)| *version).collect();
        assert_eq!(evaluated, [5, 10, 13]);
    }
}

/// Each rank sends one gradient, the mean of its micro-steps.
#[test]
fn micro_steps_that_workers_add_up_have_the_bits_of_a_plain_loop() {
    let (cluster, model) = (Cluster::start(2), Synthetic::default());
    for (gradient, world) in [(Dtype::Bf16, 2), (Dtype::F16, 1), (Dtype::F32, 1)] {
        let plan = Scenario { gradient, world, micro_steps: 3, on_worker: true, ..Scenario::exact(6) };
        let plan = Scenario { clip: Some(1.0), ..plan };
        check(&cluster, &model, &plan, &format!("on-worker-{gradient}-{world}"));
    }
    let delay = Delay { warmup: 2, drain_every: 4, correction: DelayCorrection::LookAhead };
    let plan = Scenario { delay: Some(delay), micro_steps: 3, on_worker: true, ..Scenario::exact(9) };
    check(&cluster, &model, &plan, "on-worker-delayed");
}

/// A delayed step is scaled and unscaled by the loss scale of the version it reads.
#[test]
fn a_delayed_step_uses_the_loss_scale_of_the_version_it_reads() {
    let (cluster, model) = (Cluster::start(2), Synthetic::default());
    let options = LossScalerOptions {
        initial: f64::from(1 << 20),
        window: 3,
        hysteresis: 1,
        consecutive_hysteresis: false,
        min: 1.0,
    };
    for world in [1, 2] {
        let delay = Some(Delay { warmup: 1, drain_every: 6, correction: DelayCorrection::LookAhead });
        let plan =
            Scenario { delay, world, clip: Some(1.0), scale: Scale::Dynamic(options), ..Scenario::exact(20) };
        let plan = Scenario { gradient: Dtype::F16, image: Dtype::F16, micro_steps: 2, ..plan };
        let trace = check(&cluster, &model, &plan, &format!("scaled-{world}"));
        let steps = &trace.steps;
        assert_eq!(steps[0].scale, options.initial);
        assert!(steps.iter().any(|step| step.skip) && steps.iter().any(|step| !step.skip));
        // Some steps still use the scale of the version that they read, although the newest version has another scale.
        let stale = |step: &_| {
            let longshore_tests::conformance::reference::Step { step, reads, scale, .. } = step;
            *reads + 2 == *step && *scale != steps[*step as usize - 2].scale_next
        };
        assert!(steps.iter().filter(|step| stale(step)).count() > 2);
    }
}

/// The GPT is the trainer's own model, with the trainer's arithmetic.
#[test]
fn a_gpt_has_the_bits_of_a_plain_loop() {
    let (cluster, model) = (Cluster::start(1), Bytes::new(Arc::new(HostDevice::new(u64::MAX))));
    let exact = Scenario { micro_steps: 2, clip: Some(1.0), ..Scenario::exact(6) };
    let two = check(&cluster, &model, &exact, "gpt");
    assert_eq!(two, check(&cluster, &model, &Scenario { on_demand: true, ..exact }, "gpt-staged"));
    let first = f32::from_bits(two.steps[0].losses[0]);
    assert!((first - 256f32.ln()).abs() < 0.2, "an untrained model's loss is {first}");
    let scale = Scale::Fixed(4096.0);
    let half = Scenario { gradient: Dtype::F16, image: Dtype::F16, scale, world: 2, ..Scenario::exact(4) };
    check(&cluster, &model, &half, "gpt-f16");
    let delay = Some(Delay { warmup: 2, drain_every: 4, correction: DelayCorrection::LookAhead });
    check(&cluster, &model, &Scenario { delay, world: 2, ..Scenario::exact(9) }, "gpt-delayed");
}
