//! The rates and the amended image: the same on every instruction set, made of the very image that the update wrote, and
//! what their formulas say.

use proptest::prelude::*;

use super::super::*;
use super::data::{Array, BLOCK, KINDS, Kind, Noise, Owned, hyper};

const GROUP: usize = 64;

fn constants(rule: Rule, hyper: &Hyper, applied: u64, lr: f64) -> Amended {
    Amended::new(rule, hyper, applied, lr).unwrap()
}

/// A gradient, and an image to be made, of so many groups.
fn arrays(groups: usize, kinds: [Kind; 2], noise: &mut Noise, wild: bool) -> (Array, Array) {
    let gradient = Array::noisy(kinds[0], groups * GROUP, noise, wild);
    (gradient, Array::blank(kinds[1], groups * GROUP, noise))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn rates_and_images_are_the_same_on_every_isa_and_split(
        groups in prop_oneof![20 => 1usize..20, 1 => Just(BLOCK / GROUP)],
        seed: u64,
        wild: bool,
        applied in 1u64..5,
    ) {
        let mut noise = Noise(seed);
        for kinds in KINDS.map(|gradient| KINDS.map(|image| [gradient, image])).concat() {
            let rule = [Rule::AdamW, Rule::Adam][noise.below(2)];
            let amended = constants(rule, &hyper(&mut noise), applied, 0.01);
            let missing = Missing { multiplier: 0.3, limit: [0.0, 1e-3, 0.1, f32::MAX][noise.below(4)] };
            let (gradient, blank) = arrays(groups, kinds, &mut noise, wild);
            let mut owned = Owned::noisy(rule, groups * GROUP, &mut noise, wild);
            let state = owned.state();
            let run = |isa, step: usize| {
                let (mut image, mut of_groups) = (blank.clone(), vec![0.0; groups]);
                for start in (0..groups).step_by(step) {
                    let end = groups.min(start + step);
                    let part = start * GROUP..end * GROUP;
                    let kept = state.kept().slice(part.clone());
                    let (gradient, mut image) = (gradient.gradient().slice(part.clone()), image.image());
                    amend(isa, &amended, missing, gradient, kept, image.slice(part));
                    rates(isa, &amended, kept.second, &mut of_groups[start..end]);
                }
                let of_groups: Vec<u32> = of_groups.into_iter().map(f32::to_bits).collect();
                (image, of_groups)
            };
            let expected = run(Isa::Scalar, groups);
            for isa in Isa::available() {
                prop_assert!(run(isa, groups) == expected, "{isa}: {kinds:?} {amended:?}");
                prop_assert!(run(isa, 1 + noise.below(groups)) == expected, "{isa}: {kinds:?}, split");
            }
        }
    }

    /// The amended image of a gradient of zeros is the image that the update had written.
    #[test]
    fn the_image_is_made_again_from_the_state(groups in 1usize..40, seed: u64, applied in 1u64..5) {
        let mut noise = Noise(seed);
        for rule in [Rule::AdamW, Rule::Adam] {
            for kind in KINDS {
                let hyper = hyper(&mut noise);
                let amended = constants(rule, &hyper, applied, 0.02);
                let (gradient, mut written) = arrays(groups, [Kind::Bf16, kind], &mut noise, false);
                let mut state = Owned::noisy(rule, groups * GROUP, &mut noise, false);
                let isa = Isa::detect();
                let scalars = Scalars::new(rule, &hyper, applied, 0.5).amended_by_worker(&amended);
                update(isa, &scalars, gradient.gradient(), state.state(), written.image(), 0.0);
                let zeros = vec![0.0; groups * GROUP];
                let mut again = Array::blank(kind, groups * GROUP, &mut noise);
                let remade = state.state();
                amend(isa, &amended, Missing { multiplier: 0.5, limit: 1.0 }, Gradient::f32(&zeros), remade.kept(), again.image());
                prop_assert!(written.image().bytes() == again.image().bytes());
            }
        }
    }

    /// The formulas of docs/delay.md in f64, for ordinary numbers.
    #[test]
    fn rates_and_images_follow_their_formulas(
        seed: u64,
        applied in 1u64..20,
        decoupled: bool,
        limit in prop_oneof![Just(f32::MAX), Just(1e-3f32), Just(0.0)],
    ) {
        let mut noise = Noise(seed);
        let hyper = hyper(&mut noise);
        let (rule, next_lr, multiplier) = (if decoupled { Rule::AdamW } else { Rule::Adam }, 0.01, 0.25);
        let amended = constants(rule, &hyper, applied, next_lr);
        let (gradient, mut image) = arrays(1, [Kind::F32, Kind::F32], &mut noise, false);
        let mut owned = Owned::noisy(rule, GROUP, &mut noise, false);
        owned.state().second.iter_mut().for_each(|v| *v = v.abs() + 1e-6);
        let state = owned.state();
        let Gradient::F32(g) = gradient.gradient() else { unreachable!() };
        let mut rate = [0.0];
        rates(Isa::detect(), &amended, state.second, &mut rate);
        let step = Missing { multiplier, limit };
        amend(Isa::detect(), &amended, step, gradient.gradient(), state.kept(), image.image());

        let correction = 1.0 - hyper.beta1.powi(applied as i32 + 1);
        let d = |v: f32| (f64::from(v) / (1.0 - hyper.beta2.powi(applied as i32))).sqrt() + hyper.eps;
        let mean = state.second.iter().map(|&v| d(v).powi(2)).sum::<f64>() / GROUP as f64;
        let expected = next_lr * (1.0 - hyper.beta1) / correction / mean.sqrt();
        prop_assert!((f64::from(rate[0]) - expected).abs() <= 1e-5 * expected, "{} {expected}", rate[0]);
        let decay = if decoupled { hyper.weight_decay } else { 0.0 };
        for (i, &found) in image.floats().iter().enumerate() {
            let (z, m) = (f64::from(state.master[i]), f64::from(state.first[i]));
            let known = next_lr * (hyper.beta1 * m / correction / d(state.second[i]) + decay * z);
            let mut element = 0.0;
            g.slice(i..i + 1).pieces(|_, g| element = f64::from(g[0]));
            let bound = f64::from(limit);
            let missing = (expected * element * f64::from(multiplier)).clamp(-bound, bound);
            let size = z.abs() + known.abs() + missing.abs();
            prop_assert!((f64::from(found) - (z - known - missing)).abs() <= 1e-5 * size + 1e-12, "{i}");
        }
    }
}
