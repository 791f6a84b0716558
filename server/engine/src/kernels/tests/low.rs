//! Updates of low-precision state: every instruction set, every split, and against updates of f32 state.

use proptest::prelude::*;

use super::super::*;
use super::data::{Array, FORMATS, KINDS, Kind, Lines, Noise, Owned, OwnedLow, hyper};

const BLOCK: usize = QUANTIZATION_BLOCK;

/// All inputs of a call.
struct Case {
    hypers: Vec<Hyper>,
    applied: u64,
    scalars: Vec<Scalars>,
    ends: Vec<usize>,
    gradient: Array,
    before: OwnedLow,
    blank: Lines,
    random: Random,
}

impl Case {
    fn noisy(rules: &[Rule], blocks: usize, noise: &mut Noise, wild: bool) -> Case {
        let count = blocks * BLOCK;
        let rule = rules[noise.below(rules.len())];
        let master = [MasterFormat::F32, MasterFormat::Bf16][noise.below(2)];
        let formats = (master, FORMATS[noise.below(3)], FORMATS[noise.below(3)]);
        let mut ends: Vec<usize> = (0..noise.below(4)).map(|_| 64 * noise.below(4 * blocks)).collect();
        ends.retain(|&end| end > 0);
        ends.push(count);
        ends.sort();
        ends.dedup();
        let multiplier = [1.0, 1.0 / 3.0, 1.0 / 65536.0][noise.below(3)];
        let applied = 1 + noise.below(3) as u64;
        let hypers: Vec<Hyper> = ends.iter().map(|_| hyper(noise)).collect();
        Case {
            scalars: hypers.iter().map(|hyper| Scalars::new(rule, hyper, applied, multiplier)).collect(),
            hypers,
            applied,
            ends,
            gradient: Array::noisy(KINDS[noise.below(3)], count, noise, wild),
            before: OwnedLow::noisy(rule, formats, count, noise, wild),
            blank: Lines::blank(KINDS[noise.below(3)], count, noise),
            random: Random {
                seed: noise.next(),
                step: noise.next(),
                // Some calls cross 2^32.
                first_element: ((noise.next() >> 30) << 8) + (1 << 32) - 512,
            },
        }
    }

    /// The same case with images that look ahead, where the rule can.
    fn looking_ahead(mut self, noise: &mut Noise) -> Case {
        for (scalars, hyper) in self.scalars.iter_mut().zip(&self.hypers) {
            if scalars.rule().can_look_ahead() {
                *scalars = scalars.looking_ahead(hyper, self.applied, f64::from(noise.unit().abs()));
            }
        }
        self
    }

    /// Makes one call for each range of blocks that ends at one of `cuts`.
    fn run(&self, isa: Isa, cuts: &[usize]) -> (OwnedLow, Lines) {
        let (mut state, mut image) = (self.before.clone(), self.blank.clone());
        let mut start = 0;
        for &end in cuts {
            let starts = [0].into_iter().chain(self.ends.iter().copied());
            let segments: Vec<_> = starts
                .zip(&self.ends)
                .map(|(from, &to)| from.max(start)..to.min(end))
                .zip(&self.scalars)
                .filter(|(range, _)| range.start < range.end)
                .map(|(range, scalars)| (range.start - start..range.end - start, scalars))
                .collect();
            let random = Random { first_element: self.random.first_element + start as u64, ..self.random };
            let gradient = self.gradient.gradient().slice(start..end);
            update_low(isa, &segments, gradient, state.part(start..end), image.part(start..end), random);
            start = end;
        }
        (state, image)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn low_update_is_the_same_on_every_isa_and_split(blocks in 1usize..12, seed: u64, wild: bool) {
        let mut noise = Noise(seed);
        let case = Case::noisy(&Rule::ALL, blocks, &mut noise, wild);
        let case = if noise.below(2) == 0 { case.looking_ahead(&mut noise) } else { case };
        let expected = case.run(Isa::Scalar, &[blocks * BLOCK]);
        for isa in Isa::available() {
            let mut cuts: Vec<usize> = (1..blocks).filter(|_| noise.below(3) == 0).map(|b| b * BLOCK).collect();
            cuts.push(blocks * BLOCK);
            prop_assert!(case.run(isa, &[blocks * BLOCK]) == expected, "{isa}: {:?}", case.scalars);
            prop_assert!(case.run(isa, &cuts) == expected, "{isa} cut at {cuts:?}: {:?}", case.scalars);
        }
    }

    #[test]
    fn f32_formats_give_what_update_gives(blocks in 1usize..6, seed: u64, wild: bool) {
        let (mut noise, count) = (Noise(seed), blocks * BLOCK);
        let rule = Rule::ALL[noise.below(Rule::ALL.len())];
        let hyper = hyper(&mut noise);
        let scalars = Scalars::new(rule, &hyper, 2, 0.5);
        let ahead = rule.can_look_ahead() && noise.below(2) == 0;
        let scalars = if ahead { scalars.looking_ahead(&hyper, 2, 0.1) } else { scalars };
        let gradient = Array::noisy(Kind::Bf16, count, &mut noise, wild);
        let mut state = Owned::noisy(rule, count, &mut noise, wild);
        let mut low = state.clone();
        let mut image = Array::blank(Kind::F16, count, &mut noise);
        let mut low_image = image.clone();
        for isa in Isa::available() {
            update(isa, &scalars, gradient.gradient(), state.state(), image.image());
            let State { master, first, second } = low.state();
            let moment = |x| if rule.state_slots() > 0 { MomentMut::F32(x) } else { MomentMut::Empty };
            let second = if second.is_empty() { MomentMut::Empty } else { MomentMut::F32(second) };
            let parts = StateLow { master: MasterMut::F32(master), first: moment(first), second };
            let random = Random { seed: 1, step: 2, first_element: 0 };
            let segments = [(0..count, &scalars)];
            update_low(isa, &segments, gradient.gradient(), parts, low_image.image(), random);
            prop_assert!(low == state && low_image == image, "{isa} {scalars:?}");
        }
    }
}

/// If the constant changes, jobs would change their bits over an upgrade, as in `bits_have_not_changed` for f32 state.
#[test]
fn low_bits_have_not_changed() {
    let found: Vec<u64> = Isa::available()
        .into_iter()
        .map(|isa| {
            let mut noise = Noise(17);
            (0..60).fold(0xCBF2_9CE4_8422_2325, |hash, _| {
                let case = Case::noisy(&RULES, 5, &mut noise, false);
                let shown = format!("{:?}", case.run(isa, &[5 * BLOCK]));
                shown.bytes().fold(hash, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3))
            })
        })
        .collect();
    assert!(found.iter().all(|&hash| hash == GOLDEN), "{found:#018x?}");
}

/// The rules that the constant was made with. A further rule would change the draws.
const RULES: [Rule; 5] = [Rule::AdamW, Rule::Adam, Rule::Sgd, Rule::Lion, Rule::Adagrad];
const GOLDEN: u64 = 0x8711_189d_0257_1cc1;

/// No random bits carry the largest magnitude of a block past the top of its code. (Once in 2^16 the code is one below
/// the top: the reciprocal of a scale is rounded.)
#[test]
fn equal_magnitudes_stay_at_the_top_of_the_code() {
    let (count, mut noise) = (16 * BLOCK, Noise(5));
    let hyper = Hyper::default();
    for step in 1..=100 {
        let magnitude = f32::from_bits((90 << 23) + noise.below(60 << 23) as u32);
        let gradient: Vec<f32> =
            (0..count).map(|at| if at.is_multiple_of(3) { -magnitude } else { magnitude }).collect();
        let scalars = Scalars::new(Rule::AdamW, &hyper, step, 1.0);
        let mut expected = None;
        for isa in Isa::available() {
            let mut image = Lines::blank(Kind::Bf16, count, &mut Noise(step));
            let (mut master, mut first, mut second) = (vec![0.0; count], vec![0; count], vec![0; count]);
            let (mut first_scales, mut second_scales) = (vec![0.0; count / BLOCK], vec![0.0; count / BLOCK]);
            let state = StateLow {
                master: MasterMut::F32(&mut master),
                first: MomentMut::Block8 { codes: &mut first, scales: &mut first_scales },
                second: MomentMut::Block8 { codes: &mut second, scales: &mut second_scales },
            };
            let random = Random { seed: 3, step, first_element: 0 };
            let segments = [(0..count, &scalars)];
            update_low(isa, &segments, Gradient::f32(&gradient), state, image.part(0..count), random);
            let top = |at: usize| if at.is_multiple_of(3) { [!127u8, !126] } else { [127, 126] };
            assert!(first.iter().enumerate().all(|(at, code)| top(at).contains(code)), "{isa} {magnitude}");
            assert!(second.iter().all(|&code| code >= 254), "{isa} {magnitude}");
            let codes = (first, second);
            assert!(expected.get_or_insert_with(|| codes.clone()) == &codes, "{isa} {magnitude}");
        }
    }
}

/// A second moment of 1e-10 of its block's largest would round to 0 99 times in 100. The update would then divide by `eps`,
/// and move 1000 learning rates.
#[test]
fn small_second_moments_do_not_round_to_zero() {
    let mut noise = Noise(11);
    let mut state = OwnedLow::zero(MasterFormat::F32, StateFormat::Block8, BLOCK);
    let (mut weights, mut largest) = (vec![0.0f32; BLOCK], 0.0f32);
    for step in 1..=200 {
        let before = weights.clone();
        let mut gradient: Vec<f32> = (0..BLOCK).map(|_| 1e-5 * noise.unit()).collect();
        gradient[0] = 1.0;
        // Gradients of padding.
        gradient[BLOCK - 16..].fill(0.0);
        let hyper = Hyper { lr: 1.0, weight_decay: 0.0, ..Hyper::default() };
        let segments = [(0..BLOCK, &Scalars::new(Rule::AdamW, &hyper, step, 1.0))];
        let random = Random { seed: 1, step, first_element: 0 };
        let (gradient, image) = (Gradient::f32(&gradient), ImageMut::F32(&mut weights));
        update_low(Isa::detect(), &segments, gradient, state.part(0..BLOCK), image, random);
        largest = before.iter().zip(&weights).fold(largest, |largest, (a, b)| largest.max((b - a).abs()));
    }
    assert!(largest < 4.0, "an element moved by {largest} learning rates");
    let MomentMut::Block8 { codes, .. } = state.part(0..BLOCK).second else { unreachable!() };
    assert_eq!(codes[BLOCK - 16..], [0; 16], "a second moment of 0 stays");
}

/// SGD without momentum does not touch its buffer, not even to round it again.
#[test]
fn blocks_of_plain_sgd_keep_their_moment() {
    let mut noise = Noise(5);
    let formats = (MasterFormat::F32, StateFormat::Block8, StateFormat::F32);
    let before = OwnedLow::noisy(Rule::Sgd, formats, 3 * BLOCK, &mut noise, false);
    let plain = Scalars::new(Rule::Sgd, &Hyper::default(), 2, 1.0);
    let momentum = Scalars::new(Rule::Sgd, &Hyper { momentum: 0.9, ..Hyper::default() }, 2, 1.0);
    let gradient = vec![0.5; 3 * BLOCK];
    for isa in Isa::available() {
        let (mut after, mut image) = (before.clone(), vec![0; 3 * BLOCK]);
        let segments =
            [(0..BLOCK + 64, &plain), (BLOCK + 64..2 * BLOCK, &momentum), (2 * BLOCK..3 * BLOCK, &plain)];
        let random = Random { seed: 3, step: 2, first_element: 0 };
        let (state, image) = (after.part(0..3 * BLOCK), ImageMut::Bf16(&mut image));
        update_low(isa, &segments, Gradient::f32(&gradient), state, image, random);
        let mut before = before.clone();
        let (MomentMut::Block8 { codes: new, .. }, MomentMut::Block8 { codes: old, .. }) =
            (after.part(0..3 * BLOCK).first, before.part(0..3 * BLOCK).first)
        else {
            unreachable!()
        };
        assert_eq!((&new[..BLOCK], &new[2 * BLOCK..]), (&old[..BLOCK], &old[2 * BLOCK..]));
        assert_ne!(new[BLOCK..2 * BLOCK], old[BLOCK..2 * BLOCK]);
    }
}

/// The mean of `value`, rounded once in each of `steps` steps at 255 positions of a block. The block's
/// largest magnitude is `scale`.
fn rounded(format: StateFormat, value: f32, scale: f32, steps: u64) -> f64 {
    // SGD with momentum 1 adds the gradient to its buffer, so that from 0 any f32 value is rounded once.
    let hyper = Hyper { momentum: 1.0, weight_decay: 0.0, lr: 0.0, ..Hyper::default() };
    let scalars = Scalars::new(Rule::Sgd, &hyper, 2, 1.0);
    let mut gradient = vec![value; BLOCK];
    gradient[0] = scale;
    let mut sum = 0.0;
    for step in 0..steps {
        let (mut master, mut image) = (vec![0.0; BLOCK], vec![0; BLOCK]);
        let (mut half, mut codes, mut scales) = (vec![0; BLOCK], vec![0; BLOCK], [0.0]);
        let first = match format {
            StateFormat::Bf16 => MomentMut::Bf16(&mut half),
            _ => MomentMut::Block8 { codes: &mut codes, scales: &mut scales },
        };
        let state = StateLow { master: MasterMut::F32(&mut master), first, second: MomentMut::Empty };
        let random = Random { seed: 7, step, first_element: 0 };
        let (gradient, image) = (Gradient::f32(&gradient), ImageMut::Bf16(&mut image));
        update_low(Isa::detect(), &[(0..BLOCK, &scalars)], gradient, state, image, random);
        let moment = match format {
            StateFormat::Bf16 => Moment::Bf16(&half),
            _ => Moment::Block8 { codes: &codes, scales: &scales },
        };
        let mut values = vec![0.0; BLOCK];
        decode(Isa::detect(), Code::Signed, moment, &mut values);
        sum += values[1..].iter().map(|&x| f64::from(x)).sum::<f64>();
    }
    sum / (steps as f64 * (BLOCK - 1) as f64)
}

#[test]
fn the_mean_of_rounded_values_is_the_value() {
    for format in [StateFormat::Bf16, StateFormat::Block8] {
        // The largest magnitude is 1. A step of the code is then at most 0.14 of a value above 1e-1, and 0.29
        // above 1e-2.
        for value in [0.3333f32, -0.77, 0.1015, 0.1001, 0.0123, -0.011, 1.3e-3, 0.987_654] {
            let mean = rounded(format, value, 1.0, 4000);
            let error = (mean - f64::from(value)) / f64::from(value);
            let step = if format == StateFormat::Bf16 { 0.008 } else { 0.6 };
            // The limit is five deviations of half a step, over a million draws.
            assert!(error.abs() < 5.0 * 0.5 * step / 1e3, "{format:?} {value}: {error}");
        }
    }
}

#[test]
#[should_panic(expected = "segment")]
fn a_gap_between_segments_is_refused() {
    let scalars = Scalars::new(Rule::Lion, &Hyper::default(), 1, 1.0);
    let (mut master, mut first, mut image) = ([0.0; 256], [0; 256], [0; 256]);
    let first = MomentMut::Bf16(&mut first);
    let state = StateLow { master: MasterMut::F32(&mut master), first, second: MomentMut::Empty };
    let random = Random { seed: 0, step: 1, first_element: 0 };
    let segments = [(0..64, &scalars), (128..256, &scalars)];
    update_low(Isa::Scalar, &segments, Gradient::f32(&[0.0; 256]), state, ImageMut::Bf16(&mut image), random);
}
