//! Weights from numbers of 64 bits. A parameter's elements are taken in pairs: the pair's index is the generator's counter.

use longshore_proto::InitialWeights;

use super::{
    philox::{self, LANES},
    quantile::{probability_below, quantile},
};

/// The elements that [`philox::draw`] has numbers for.
const GROUP: usize = 2 * LANES;

/// How the weights of a run of parameters are drawn: what is known before the first number.
#[derive(Clone, Copy, Debug)]
pub(super) enum Draw {
    Nothing,
    Constant(f32),
    Uniform { low: f64, width: f64, ends: (f32, f32) },
    Normal { mean: f64, std: f64 },
    Truncated(Truncated),
}

/// A normal distribution between two bounds. It is drawn from the lower half, where probabilities are exact however small
/// they are; `std` is negative where that mirrors it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Truncated {
    mean: f64,
    std: f64,
    /// The probability of all that lies below, and of what lies between.
    below: f64,
    between: f64,
    ends: (f32, f32),
}

impl Draw {
    /// `weights` were validated.
    pub(super) fn of(weights: InitialWeights) -> Draw {
        let ends = weights.ends().unwrap_or_default();
        match weights {
            InitialWeights::Uploaded => Draw::Nothing,
            InitialWeights::Constant(value) => Draw::Constant(value as f32),
            InitialWeights::Uniform { low, high } => Draw::Uniform { low, width: high - low, ends },
            InitialWeights::Normal { mean, std } => Draw::Normal { mean, std },
            InitialWeights::TruncatedNormal { mean, std, low, high } => {
                let (from, to) = ((low - mean) / std, (high - mean) / std);
                let (from, to, std) = if from > 0.0 { (-to, -from, -std) } else { (from, to, std) };
                let below = probability_below(from);
                let up_to = if to > 0.0 { 1.0 - probability_below(-to) } else { probability_below(to) };
                Draw::Truncated(Truncated { mean, std, below, between: up_to - below, ends })
            }
        }
    }

    /// Writes consecutive elements of a parameter, from element `at` on.
    pub(super) fn write(&self, seed: u64, param: u32, at: u64, target: &mut [f32]) {
        match *self {
            Draw::Nothing => target.fill(0.0),
            Draw::Constant(value) => target.fill(value),
            Draw::Uniform { low, width, ends } => {
                fill(seed, param, at, target, |part| within((low + width * part) as f32, ends));
            }
            Draw::Normal { mean, std } => {
                fill(seed, param, at, target, |part| (mean + std * quantile(part)) as f32);
            }
            Draw::Truncated(Truncated { mean, std, below, between, ends }) => {
                fill(seed, param, at, target, |part| {
                    within((mean + std * quantile(below + between * part)) as f32, ends)
                });
            }
        }
    }
}

fn within(value: f32, (low, high): (f32, f32)) -> f32 {
    value.max(low).min(high)
}

fn fill(seed: u64, param: u32, at: u64, target: &mut [f32], weight: impl Fn(f64) -> f32) {
    // A part of a parameter may begin within a pair.
    let (second, target) = target.split_at_mut(((at % 2) as usize).min(target.len()));
    for target in second {
        *target = weight(part(philox::draw(seed, param.into(), at / 2)[0][1]));
    }
    for (group, target) in target.chunks_mut(GROUP).enumerate() {
        let pair = at.div_ceil(2) + (group * LANES) as u64;
        let numbers = philox::draw(seed, param.into(), pair);
        for (target, &number) in target.iter_mut().zip(numbers.as_flattened()) {
            *target = weight(part(number));
        }
    }
}

/// A number above 0 and below 1: the middle of one of 2^52 equal parts. It is exact, and so is 1 less it.
fn part(number: u64) -> f64 {
    const PARTS: f64 = (1u64 << 52) as f64;
    ((number >> 12) as f64 + 0.5) / PARTS
}
