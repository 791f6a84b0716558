//! Every bit that a run computes is the one that a plain loop computes: master weights, moments, images, losses,
//! norms.

use std::sync::Arc;

use longshore_engine::kernels::{self, Amended, Gradient, ImageMut, Isa, Kept, Missing};
use longshore_proto::{Dtype, Hyper, Rule};
use longshore_tests::conformance::{
    cluster::Cluster,
    gpt::Bytes,
    run::check,
    scenario::{Delay, Scale, Scenario},
    synthetic::Synthetic,
};
use longshore_worker::{DelayCorrection, HostDevice, LossScalerOptions, amend::amend};
use proptest::prelude::*;

/// Every combination runs, over two servers.
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
                    // The cases are different ones: clipping clips, and the wire's type shows.
                    assert_eq!(trace.steps[0].clip_coefficient < 1.0, clip.is_some());
                    assert!(trace.steps.iter().all(|step| !step.skip && step.norm > Some(0.0)));
                }
            }
        }
    }
}

/// Gradients have one type and images another, shards have several chunks, and the clip seldom clips.
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
    let delay =
        Some(Delay { warmup: 2, drain_every: 4, newer_from: 1, correction: DelayCorrection::LookAhead });
    check(&cluster, &model, &Scenario { delay, steps: 9, ..staged }, "staged-delayed");
}

/// There are warm-up, delayed steps, evaluations that drain, and the end, with every correction.
#[test]
fn delayed_steps_have_the_bits_of_a_plain_delayed_loop() {
    let (cluster, model) = (Cluster::start(2), Synthetic::default());
    let corrections = [
        ("plain", 1, DelayCorrection::None),
        ("half", 2, DelayCorrection::Compensation(0.5)),
        ("full", 1, DelayCorrection::Compensation(1.0)),
        ("ahead", 2, DelayCorrection::LookAhead),
        ("ahead-by-this-rate", 1, DelayCorrection::LookAheadByThisRate),
        ("worker-local", 1, DelayCorrection::WorkerLocal(1.0)),
        ("worker-local-more", 1, DelayCorrection::WorkerLocal(1.5)),
    ];
    for (name, world, correction) in corrections {
        let delay = Some(Delay { warmup: 3, drain_every: 5, newer_from: 1, correction });
        let plan = Scenario { delay, world, clip: Some(1.0), ..Scenario::exact(13) };
        let trace = check(&cluster, &model, &plan, name);
        let reads: Vec<u64> = trace.steps.iter().map(|step| step.reads).collect();
        assert_eq!(reads, [0, 1, 2, 2, 3, 5, 5, 6, 7, 8, 10, 10, 11]);
        let evaluated: Vec<u64> = trace.images.iter().map(|(version, _)| *version).collect();
        assert_eq!(evaluated, [5, 10, 13]);
    }
}

/// The worker adds the newest step itself. It does so with every type on the wire, at stage 3, with micro-steps that it adds
/// up, and through overflows, which amend nothing.
#[test]
fn weights_that_the_worker_amends_have_the_bits_of_a_plain_loop() {
    let (cluster, model) = (Cluster::start(2), Synthetic::default());
    let correction = DelayCorrection::WorkerLocal(1.0);
    let delay = Some(Delay { warmup: 2, drain_every: 5, newer_from: 3, correction });
    let plan = Scenario { delay, clip: Some(1.0), ..Scenario::exact(13) };
    let whole = check(&cluster, &model, &plan, "amended");
    assert_eq!(whole, check(&cluster, &model, &Scenario { on_demand: true, ..plan }, "amended-staged"));
    let exact = check(&cluster, &model, &Scenario { delay: None, ..plan }, "amended-not");
    assert_ne!(whole.state, exact.state);
    for (gradient, image) in [(Dtype::F32, Dtype::F32), (Dtype::F16, Dtype::Bf16), (Dtype::Bf16, Dtype::F16)]
    {
        let plan = Scenario { gradient, image, ..plan };
        check(&cluster, &model, &plan, &format!("amended-{gradient}-{image}"));
    }
    check(&cluster, &model, &Scenario { micro_steps: 3, on_worker: true, ..plan }, "amended-on-worker");
    let options = LossScalerOptions {
        initial: f64::from(1 << 20),
        window: 3,
        hysteresis: 1,
        consecutive_hysteresis: false,
        min: 1.0,
    };
    let scaled = Scenario { scale: Scale::Dynamic(options), steps: 24, gradient: Dtype::F16, ..plan };
    let trace = check(&cluster, &model, &Scenario { image: Dtype::F16, ..scaled }, "amended-scaled");
    let skips = |step: u64| trace.steps[step as usize - 1].skip;
    assert!((3..24).any(|step| skips(step) && !skips(step + 1)), "a skip among delayed steps");
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
    let delay = Delay { warmup: 2, drain_every: 4, newer_from: 2, correction: DelayCorrection::LookAhead };
    let plan = Scenario { delay: Some(delay), micro_steps: 3, on_worker: true, ..Scenario::exact(9) };
    check(&cluster, &model, &plan, "on-worker-delayed");
}

/// Half of the micro-steps read the newest version; with stage 3 and with two ranks too.
#[test]
fn later_micro_steps_of_delayed_steps_have_the_bits_of_a_plain_loop() {
    let (cluster, model) = (Cluster::start(2), Synthetic::default());
    let mut traces = Vec::new();
    for (name, newer_from, world, on_demand) in [
        ("newest", 0, 1, false),
        ("half", 2, 1, false),
        ("half-staged", 2, 1, true),
        ("half-two", 2, 2, false),
        ("never", 4, 1, false),
    ] {
        let delay =
            Some(Delay { warmup: 2, drain_every: 4, newer_from, correction: DelayCorrection::LookAhead });
        let plan =
            Scenario { delay, world, on_demand, micro_steps: 4, clip: Some(1.0), ..Scenario::exact(9) };
        traces.push(check(&cluster, &model, &plan, &format!("newer-{name}")).state);
    }
    assert_eq!(traces[1], traces[2]);
    assert!(traces[0] != traces[1] && traces[1] != traces[4]);
}

/// A delayed step is scaled, and unscaled, by the loss scale of the version it reads.
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
        let delay =
            Some(Delay { warmup: 1, drain_every: 6, newer_from: 1, correction: DelayCorrection::LookAhead });
        let plan =
            Scenario { delay, world, clip: Some(1.0), scale: Scale::Dynamic(options), ..Scenario::exact(20) };
        let plan = Scenario { gradient: Dtype::F16, image: Dtype::F16, micro_steps: 2, ..plan };
        let trace = check(&cluster, &model, &plan, &format!("scaled-{world}"));
        let steps = &trace.steps;
        assert_eq!(steps[0].scale, options.initial);
        assert!(steps.iter().any(|step| step.skip) && steps.iter().any(|step| !step.skip));
        // The scale changed while a step that does not see the change yet was under way.
        let stale = |step: &_| {
            let longshore_tests::conformance::reference::Step { step, reads, scale, .. } = step;
            *reads + 2 == *step && *scale != steps[*step as usize - 2].scale_next
        };
        assert!(steps.iter().filter(|step| stale(step)).count() > 2);
    }
}

/// This is the trainer's own model and arithmetic.
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
    let delay =
        Some(Delay { warmup: 2, drain_every: 4, newer_from: 1, correction: DelayCorrection::LookAhead });
    check(&cluster, &model, &Scenario { delay, world: 2, ..Scenario::exact(9) }, "gpt-delayed");
}

/// What a server makes of a version's state and of `gradient`: the rates, and the amended image, which goes to `image`.
fn served(
    isa: Isa,
    amended: &Amended,
    state: &[Vec<f32>; 3],
    gradient: &[f32],
    image: &mut Vec<u8>,
    (dtype, limit): (Dtype, f32),
) -> Vec<f32> {
    let kept = Kept { master: &state[0], first: &state[1], second: &state[2] };
    let count = gradient.len();
    let (mut wide, mut half) = (vec![0.0; count], vec![0; count]);
    let target = match dtype {
        Dtype::F32 => ImageMut::F32(&mut wide),
        Dtype::F16 => ImageMut::F16(&mut half),
        Dtype::Bf16 => ImageMut::Bf16(&mut half),
    };
    let missing = Missing { multiplier: 0.7, limit };
    kernels::amend(isa, amended, missing, Gradient::f32(gradient), kept, target);
    *image = match dtype {
        Dtype::F32 => wide.iter().flat_map(|x| x.to_le_bytes()).collect(),
        Dtype::F16 | Dtype::Bf16 => half.iter().flat_map(|x| x.to_le_bytes()).collect(),
    };
    let mut rates = vec![0.0; count / 64];
    kernels::rates(isa, amended, &state[2], &mut rates);
    rates
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    /// A worker amends an image to the bits that a server's kernels make of the state, on every instruction set.
    #[test]
    fn workers_and_servers_amend_alike(
        groups in 1usize..40,
        cut in 0usize..64,
        numbers in prop::collection::vec((-2.0f32..2.0, -1e-2f32..1e-2, 0.0f32..1e-3, -3.0f32..3.0), 97),
        dtype in prop::sample::select(vec![Dtype::F32, Dtype::F16, Dtype::Bf16]),
        limit in prop::sample::select(vec![f32::MAX, 0.05, 1e-3]),
    ) {
        let count = groups * 64;
        let of = |of: fn(&(f32, f32, f32, f32)) -> f32| -> Vec<f32> {
            (0..count).map(|index| of(&numbers[index * 31 % 97]) * (1.0 + (index % 7) as f32)).collect()
        };
        let (state, gradient) = ([of(|n| n.0), of(|n| n.1), of(|n| n.2)], of(|n| n.3));
        let amended = Amended::new(Rule::AdamW, &Hyper::default(), 3, 0.02).unwrap();
        let zeros = vec![0.0; count];
        for isa in Isa::available() {
            let (mut plain, mut expected) = (Vec::new(), Vec::new());
            let rates = served(isa, &amended, &state, &zeros, &mut plain, (dtype, limit));
            served(isa, &amended, &state, &gradient, &mut expected, (dtype, limit));
            let wire: Vec<u8> = gradient.iter().flat_map(|g| g.to_le_bytes()).collect();
            // The part begins and ends inside groups, perhaps inside the same one, and is never empty.
            let size = dtype.bytes() as usize;
            let (from, to) = (cut, (count - cut / 2).max(cut + 1));
            let gradient = (Dtype::F32, &wire[from * 4..to * 4]);
            amend((dtype, &mut plain[from * size..to * size]), (from, &rates), gradient, (0.7, limit));
            prop_assert!(plain[from * size..to * size] == expected[from * size..to * size], "{isa}");
        }
    }
}
