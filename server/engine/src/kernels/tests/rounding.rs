//! Stochastic rounding: the random bits, and the mean of values that they round.

use super::super::low::Usage;
use super::super::*;

const BLOCK: usize = QUANTIZATION_BLOCK;
const COUNT: usize = 1 << 20;

/// The bits of consecutive elements in a step.
fn draw(seed: u64, step: u64, usage: Usage) -> Vec<u32> {
    let key = Random { seed, step, first_element: 0 }.key(0, usage);
    (0..COUNT as u32).map(|index| key.hash(index)).collect()
}

/// Pearson's correlation, in standard deviations of the correlation of independent draws.
fn correlation(a: impl Iterator<Item = u32>, b: impl Iterator<Item = u32>, bits: u32) -> f64 {
    let middle = (f64::from((1u64 << bits) as f32) - 1.0) / 2.0;
    let (mut sum, mut count) = (0.0, 0.0f64);
    for (a, b) in a.zip(b) {
        sum += (f64::from(a) - middle) * (f64::from(b) - middle);
        count += 1.0;
    }
    let variance = (f64::from((1u64 << bits) as f32).powi(2) - 1.0) / 12.0;
    sum / variance / count.sqrt()
}

#[test]
fn halves_are_uniform_and_independent_of_neighbours_steps_and_each_other() {
    for seed in 0..4 {
        let step = draw(seed, 1000, Usage::Moments);
        let others = [
            draw(seed, 1001, Usage::Moments),
            draw(seed ^ 1, 1000, Usage::Moments),
            draw(seed, 1000, Usage::Master),
        ];
        for shift in [0, 16] {
            let half = |x: &u32| (x >> shift) & 0xFFFF;
            let mut buckets = [0f64; 256];
            let mut low = [0f64; 256];
            for x in step.iter().map(half) {
                buckets[x as usize >> 8] += 1.0;
                low[x as usize & 0xFF] += 1.0;
            }
            for counts in [buckets, low] {
                let expected = COUNT as f64 / 256.0;
                let chi: f64 = counts.iter().map(|count| (count - expected).powi(2) / expected).sum();
                // With 255 degrees of freedom the mean is 255 and the standard deviation 22.6.
                assert!(chi < 255.0 + 5.0 * 22.6, "chi squared {chi}");
            }
            for distance in [1, 2, 16, 256, 65_536] {
                let sigmas = correlation(step.iter().map(half), step[distance..].iter().map(half), 16);
                assert!(sigmas.abs() < 5.0, "neighbours at {distance}: {sigmas}");
            }
            for other in &others {
                let sigmas = correlation(step.iter().map(half), other.iter().map(half), 16);
                assert!(sigmas.abs() < 5.0, "steps: {sigmas}");
            }
        }
        let sigmas = correlation(step.iter().map(|x| x & 0xFFFF), step.iter().map(|x| x >> 16), 16);
        assert!(sigmas.abs() < 5.0, "halves: {sigmas}");
    }
}

/// The mean of `value`, rounded once in each of `steps` steps at 255 positions of a block. The block's
/// largest magnitude is `scale`.
fn rounded(format: StateFormat, value: f32, scale: f32, steps: u64) -> f64 {
    // In SGD with momentum 1 the buffer becomes itself plus the gradient, so that from 0 any f32 value is rounded
    // once.
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
