//! Bit equality: between instruction sets, and between one call and several.

use proptest::prelude::*;

use super::super::*;
use super::data::{Array, BLOCK, KINDS, Kind, Noise, Owned, hyper};

/// Lengths that are mostly short and odd, so that heads and tails are tested.
fn length() -> impl Strategy<Value = usize> {
    prop_oneof![
        20 => 0usize..100,
        8 => 100usize..1000,
        1 => 0..=2 * BLOCK,
        1 => prop_oneof![Just(BLOCK), Just(BLOCK - 1), Just(BLOCK + 1), Just(2 * BLOCK)],
    ]
}

/// The correction of the delay.
#[derive(Clone, Copy, Debug)]
enum Corrected {
    Not,
    Ahead(f64),
}

impl Corrected {
    fn scalars(self, rule: Rule, hyper: &Hyper, applied: u64, multiplier: f32) -> Scalars {
        let scalars = Scalars::new(rule, hyper, applied, multiplier);
        match self {
            Corrected::Ahead(lr) if rule.can_look_ahead() => scalars.looking_ahead(hyper, applied, lr),
            _ => scalars,
        }
    }
}

/// All combinations of rule, gradient, image and correction for short slices, and a few of them for long ones.
fn combinations(count: usize, noise: &mut Noise) -> Vec<(Rule, Kind, Kind, Corrected)> {
    let mut all = vec![];
    for rule in Rule::ALL {
        for gradient in KINDS {
            for image in KINDS {
                for corrected in [Corrected::Not, Corrected::Ahead(0.02)] {
                    all.push((rule, gradient, image, corrected));
                }
            }
        }
    }
    if count > 1000 {
        all = (0..4).map(|_| all[noise.below(all.len())]).collect();
    }
    all
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn update_is_the_same_on_every_isa(count in length(), seed: u64, wild: bool, applied in 1u64..4) {
        let mut noise = Noise(seed);
        for (rule, gradient, image, corrected) in combinations(count, &mut noise) {
            let gradient = Array::noisy(gradient, count, &mut noise, wild);
            let before = Owned::noisy(rule, count, &mut noise, wild);
            let blank = Array::blank(image, count, &mut noise);
            let multiplier = [1.0, 1.0 / 3.0, 1.0 / 65536.0][noise.below(3)];
            let scalars = corrected.scalars(rule, &hyper(&mut noise), applied, multiplier);
            let run = |isa| {
                let (mut state, mut image) = (before.clone(), blank.clone());
                update(isa, &scalars, gradient.gradient(), state.state(), image.image());
                (state, image)
            };
            let expected = run(Isa::Scalar);
            for isa in Isa::available() {
                prop_assert!(run(isa) == expected, "{isa}: {scalars:?} {:?} {corrected:?}", image_kind(&blank));
            }
        }
    }

    #[test]
    fn update_is_the_same_however_it_is_split(count in 1usize..3000, seed: u64, wild: bool) {
        let mut noise = Noise(seed);
        for isa in Isa::available() {
            let rule = Rule::ALL[noise.below(Rule::ALL.len())];
            let gradient = Array::noisy(KINDS[noise.below(3)], count, &mut noise, wild);
            let before = Owned::noisy(rule, count, &mut noise, wild);
            let blank = Array::blank(KINDS[noise.below(3)], count, &mut noise);
            let corrected = [Corrected::Not, Corrected::Ahead(0.1)][noise.below(2)];
            let scalars = corrected.scalars(rule, &hyper(&mut noise), 2, 0.5);
            let (mut whole, mut whole_image) = (before.clone(), blank.clone());
            update(isa, &scalars, gradient.gradient(), whole.state(), whole_image.image());
            let (mut parts, mut parts_image) = (before, blank);
            let mut start = 0;
            while start < count {
                let part = start..(start + 1 + noise.below(count)).min(count);
                update(
                    isa,
                    &scalars,
                    gradient.gradient().slice(part.clone()),
                    parts.state().slice(part.clone()),
                    parts_image.image().slice(part.clone()),
                );
                start = part.end;
            }
            prop_assert!(parts == whole && parts_image == whole_image, "{isa}: {scalars:?}");
        }
    }

    #[test]
    fn sums_and_casts_are_the_same_on_every_isa_and_split(count in length(), seed: u64, wild: bool) {
        let mut noise = Noise(seed);
        for kind in KINDS {
            let gradient = Array::noisy(kind, count, &mut noise, wild);
            let before = Array::noisy(Kind::F32, count, &mut noise, wild);
            let blank = Array::blank(kind, count, &mut noise);
            let run = |isa, at: usize| {
                let (mut widened, mut sum, mut image) = (before.clone(), before.clone(), blank.clone());
                for part in [0..at, at..count] {
                    let gradient = gradient.gradient().slice(part.clone());
                    widen(isa, gradient, &mut widened.floats()[part.clone()]);
                    accumulate(isa, gradient, &mut sum.floats()[part.clone()]);
                    let mut source = before.clone();
                    cast(isa, &source.floats()[part.clone()], image.image().slice(part));
                }
                (widened, sum, image)
            };
            let expected = run(Isa::Scalar, 0);
            for isa in Isa::available() {
                prop_assert!(run(isa, noise.below(count + 1)) == expected, "{isa} {kind:?}");
            }
        }
    }

    #[test]
    fn statistics_are_the_same_on_every_isa(count in length(), seed: u64, wild: bool) {
        let mut noise = Noise(seed);
        for kind in KINDS {
            let mut gradient = Array::noisy(kind, count, &mut noise, wild);
            if noise.below(2) == 0 && count > 0 {
                poison(gradient.image(), noise.below(count));
            }
            let before = Array::noisy(Kind::F32, count, &mut noise, false);
            let reference = statistics(Isa::Scalar, gradient.gradient());
            let mut reference_sum = before.clone();
            accumulate(Isa::Scalar, gradient.gradient(), reference_sum.floats());
            let reference_fused = statistics(Isa::Scalar, Gradient::f32(reference_sum.floats()));
            prop_assert_eq!(reference.sum_squares.is_finite(), reference.first_nonfinite.is_none());
            for isa in Isa::available() {
                prop_assert_eq!(bits(statistics(isa, gradient.gradient())), bits(reference), "{} {:?}", isa, kind);
                let mut sum = before.clone();
                let fused = accumulate_statistics(isa, gradient.gradient(), sum.floats());
                prop_assert_eq!(bits(fused), bits(reference_fused), "{} {:?}", isa, kind);
                prop_assert!(sum == reference_sum, "{isa} {kind:?}");
            }
        }
    }
}

fn bits(statistics: Statistics) -> (u64, Option<u32>) {
    (statistics.sum_squares.to_bits(), statistics.first_nonfinite)
}

fn image_kind(array: &Array) -> &'static str {
    match array.gradient() {
        Gradient::F32(_) => "f32",
        Gradient::F16(_) => "f16",
        Gradient::Bf16(_) => "bf16",
    }
}

fn poison(image: ImageMut<'_>, at: usize) {
    match image {
        ImageMut::F32(x) => x[at] = f32::NEG_INFINITY,
        ImageMut::F16(x) => x[at] = 0xFC00,
        ImageMut::Bf16(x) => x[at] = 0xFF80,
    }
}

#[test]
fn statistics_find_the_first_nonfinite_element_and_sum_squares() {
    for isa in Isa::available() {
        let mut gradient = vec![0.5f32; 1001];
        let clean = statistics(isa, Gradient::f32(&gradient));
        assert_eq!(clean, Statistics { sum_squares: 250.25, first_nonfinite: None });
        gradient[999] = f32::NAN;
        gradient[37] = f32::INFINITY;
        let statistics = statistics(isa, Gradient::f32(&gradient));
        assert_eq!(statistics.first_nonfinite, Some(37));
        assert_eq!(statistics.sum_squares.to_bits(), f64::NAN.to_bits());
    }
}

/// Some squares are too large for f32, some have few bits there and some just fit. Zeros and ordinary
/// elements lie between them.
#[test]
fn sums_of_squares_are_right_over_the_whole_range() {
    let mut noise = Noise(7);
    for exponent in -149..128i32 {
        for (share, other) in [(1, 0.0f32), (7, 0.0), (7, 1e-17), (7, 3.0)] {
            let gradient: Vec<f32> = (0..3000)
                .map(|_| {
                    let x = (2f64.powi(exponent) * (1.0 + noise.below(128) as f64 / 128.0)) as f32;
                    if noise.below(share) == 0 { x } else { other }
                })
                .collect();
            let exact: f64 = gradient.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
            let reference = statistics(Isa::Scalar, Gradient::f32(&gradient));
            assert_eq!(reference.first_nonfinite, None);
            let error = (reference.sum_squares / exact - 1.0).abs();
            // There are sixteen additions, each right to 2^-24.
            assert!(error < 1e-6, "2^{exponent}, one in {share} beside {other}: {error:e}");
            for isa in Isa::available() {
                assert_eq!(
                    bits(statistics(isa, Gradient::f32(&gradient))),
                    bits(reference),
                    "{isa} 2^{exponent}"
                );
            }
        }
    }
}

#[test]
#[should_panic(expected = "first state slot")]
fn a_missing_state_slot_is_refused() {
    let (scalars, mut master, mut image) =
        (Scalars::new(Rule::Lion, &Hyper::default(), 1, 1.0), [0.0; 4], [0; 4]);
    let state = State { master: &mut master, first: &mut [], second: &mut [] };
    update(Isa::Scalar, &scalars, Gradient::f32(&[0.0; 4]), state, ImageMut::Bf16(&mut image));
}

#[test]
#[should_panic(expected = "image against gradient")]
fn a_short_image_is_refused() {
    let (scalars, mut master, mut first) =
        (Scalars::new(Rule::Lion, &Hyper::default(), 1, 1.0), [0.0; 4], [0.0; 4]);
    let state = State { master: &mut master, first: &mut first, second: &mut [] };
    update(Isa::Scalar, &scalars, Gradient::f32(&[0.0; 4]), state, ImageMut::Bf16(&mut [0; 3]));
}

/// A Python process may flush denormals or round otherwise on the threads that call the kernels.
#[test]
fn no_bit_depends_on_the_floating_point_mode_of_the_calling_thread() {
    let noise = &mut Noise(36);
    for (rule, wild, isa) in Rule::ALL
        .into_iter()
        .flat_map(|rule| [false, true].map(|wild| (rule, wild)))
        .flat_map(|(rule, wild)| Isa::available().into_iter().map(move |isa| (rule, wild, isa)))
    {
        let gradient = Array::noisy(Kind::F32, BLOCK / 8, noise, wild);
        let (before, hyper) = (Owned::noisy(rule, BLOCK / 8, noise, wild), hyper(noise));
        let run = || {
            let (mut state, mut image) = (before.clone(), Array::blank(Kind::Bf16, BLOCK / 8, &mut Noise(1)));
            let scalars = Scalars::new(rule, &hyper, 2, 1.0 / 65536.0);
            update(isa, &scalars, gradient.gradient(), state.state(), image.image());
            let mut sums = before.master.clone();
            accumulate(isa, gradient.gradient(), sums.floats());
            let Statistics { sum_squares, first_nonfinite } = statistics(isa, gradient.gradient());
            (state, image, sums, sum_squares.to_bits(), first_nonfinite)
        };
        let expected = run();
        let foreign = crate::memory::float::foreign_for_tests();
        let found = run();
        drop(foreign);
        assert!(found == expected, "{rule:?} on {isa}");
    }
}

/// Number of each rule, from weights, state and image after three steps. If it changes, running jobs would change their
/// weights' bits over an upgrade, and servers of two builds would disagree.
#[test]
fn bits_have_not_changed() {
    for isa in Isa::available() {
        let found: Vec<u64> = Rule::ALL.into_iter().map(|rule| golden(isa, rule)).collect();
        assert_eq!(found, GOLDEN, "{isa}: {found:#018x?}");
    }
}

const GOLDEN: [u64; 6] = [
    0x7613_7d26_2824_c117, // in the order of Rule::ALL
    0x90ae_2d45_f911_7f44,
    0x1384_6b67_df97_aabd,
    0xe16b_f844_c996_b0b9,
    0xe091_65d3_042c_fabf,
    0x7191_1f29_465c_22b8,
];

fn golden(isa: Isa, rule: Rule) -> u64 {
    let hyper =
        Hyper { weight_decay: 0.1, momentum: 0.9, dampening: 0.3, lr_decay: 0.01, ..Hyper::default() };
    let mut noise = Noise(11);
    let count = BLOCK / 16 + 5;
    let mut state = Owned::noisy(rule, count, &mut noise, false);
    let mut image = Array::blank(Kind::Bf16, count, &mut noise);
    for t in 1..=3 {
        let gradient = Array::noisy(Kind::F16, count, &mut noise, false);
        let scalars = Scalars::new(rule, &hyper, t, 1.0 / 3.0);
        update(isa, &scalars, gradient.gradient(), state.state(), image.image());
    }
    let state = state.state();
    let ImageMut::Bf16(image) = image.image() else { unreachable!() };
    let words = [&*state.master, state.first, state.second].into_iter().flatten().map(|x| x.to_bits());
    // FNV-1a over 32-bit words.
    words
        .chain(image.iter().map(|&bits| u32::from(bits)))
        .fold(0xCBF2_9CE4_8422_2325, |hash, word| (hash ^ u64::from(word)).wrapping_mul(0x0100_0000_01B3))
}
