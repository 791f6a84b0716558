//! Low-precision state, one element at a time: **the specification** of rounding, codes and scales.

use super::super::low::{
    self as passes, Code, Encoding, Half, InLoop, Key, Passes, QUANTIZATION_BLOCK, Random, StateLow, Tables,
};
use super::super::{Gradient, ImageMut, Moment, Scalars, State, isa::LANES};
use super::convert::{Bf16, CANONICAL_NAN, F16, F32, Format, Nothing, quiet};
use super::floats;
use std::ops::Range;

const BLOCK: usize = QUANTIZATION_BLOCK;

/// The passes in plain Rust.
#[derive(Clone, Copy)]
struct Scalar;

pub(in super::super) fn update_low(
    segments: &[(Range<usize>, &Scalars)],
    gradient: Gradient,
    state: StateLow,
    image: ImageMut,
    random: Random,
) {
    passes::update(Scalar, segments, gradient, state, image, random);
}

pub(in super::super) fn decode(code: Code, moment: Moment, to: &mut [f32]) {
    passes::decode(Scalar, code, moment, to);
}

pub(in super::super) fn encode(code: Code, from: &[f32], codes: &mut [u8], scales: &mut [f32]) {
    passes::encode(Scalar, code, from, codes, scales);
}

impl Passes for Scalar {
    fn update(self, s: &Scalars, gradient: Gradient, state: State, image: Option<ImageMut>) {
        floats::update_parts(s, gradient, state, image);
    }

    fn update_low_moments(self, _: &Scalars, _: Gradient, _: &mut [f32], _: InLoop, _: Option<ImageMut>) {
        unreachable!("the reference does one thing after another");
    }

    fn fuses(self, _: &ImageMut) -> bool {
        false
    }

    fn widen_bf16(self, from: &[u16], to: &mut [f32]) {
        for (to, &bits) in to.iter_mut().zip(from) {
            *to = quiet(Bf16::widen(bits));
        }
    }

    fn decode(self, code: Code, from: &[u8], scale: f32, to: &mut [f32]) {
        if !scale.is_finite() {
            to.fill(CANONICAL_NAN);
            return;
        }
        for (to, &bits) in to.iter_mut().zip(from) {
            *to = decode_element(code, bits, scale);
        }
    }

    fn random(self, key: Key, first: u32, to: &mut [u32; BLOCK]) {
        for (index, to) in to.iter_mut().enumerate() {
            *to = key.hash(first + index as u32);
        }
    }

    fn round_bf16(self, from: &[f32], random: &[u32; BLOCK], half: Half, to: &mut [u16]) {
        for ((to, &x), &random) in to.iter_mut().zip(from).zip(random) {
            *to = round_element(x, sixteen(random, half));
        }
    }

    fn encode(self, code: Code, from: &[f32], random: &[u32; BLOCK], half: Half, to: &mut [u8]) -> f32 {
        let largest = from.iter().map(|x| x.abs().to_bits()).max().unwrap_or(0);
        let scale = scale(largest);
        if scale == 0.0 || scale.is_nan() {
            to.fill(0);
            return scale;
        }
        let reciprocal = 1.0 / scale;
        for ((to, &x), &random) in to.iter_mut().zip(from).zip(random) {
            *to = encode_element(code, x, reciprocal, sixteen(random, half));
        }
        scale
    }

    fn encode_both(self, _: Code, _: Encoding, _: Key, _: u32) -> [f32; 2] {
        unreachable!("the reference does one thing after another");
    }

    fn round_master(self, new: &[f32], key: Key, first: u32, master: &mut [u16], image: Option<ImageMut>) {
        fn run<I: Format>(new: &[f32], key: Key, first: u32, master: &mut [u16], image: &mut [I::Bits]) {
            for (index, ((&new, master), image)) in new.iter().zip(master).zip(image).enumerate() {
                *master = round_element(new, sixteen(key.hash(first + index as u32), Half::Low));
                *image = I::narrow(quiet(Bf16::widen(*master)));
            }
        }
        match image {
            Some(ImageMut::F32(i)) => run::<F32>(new, key, first, master, i),
            Some(ImageMut::F16(i)) => run::<F16>(new, key, first, master, i),
            Some(ImageMut::Bf16(i)) => run::<Bf16>(new, key, first, master, i),
            None => run::<Nothing>(new, key, first, master, &mut [(); BLOCK]),
        }
    }

    fn finish(self) {}
}

#[inline(always)]
fn sixteen(random: u32, half: Half) -> u32 {
    match half {
        Half::Low => random & 0xFFFF,
        Half::High => random >> 16,
    }
}

/// Rounds a value stochastically to bf16, after `quiet`. The lower half of the bits is a fraction of the
/// upper half's unit. The probability of rounding away from zero is that fraction, to the last bit. Values of
/// bf16 stay, infinities and the canonical NaN among them.
#[inline(always)]
fn round_element(x: f32, random: u32) -> u16 {
    ((x.to_bits() + random) >> 16) as u16
}

/// The scale of a block, from the largest bits of its magnitudes. The bits are ordered as the magnitudes are.
#[inline(always)]
pub(in super::super) fn scale(largest: u32) -> f32 {
    if largest >= f32::INFINITY.to_bits() {
        CANONICAL_NAN
    } else if largest < Tables::LEAST_SCALE {
        0.0
    } else {
        f32::from_bits(largest)
    }
}

#[inline(always)]
fn decode_element(code: Code, bits: u8, scale: f32) -> f32 {
    let tables = code.tables();
    // f carries the sign. For a code of 0 or more, f is the code plus half a unit. For a negative code, f is
    // -1 - q plus half a unit.
    let f = match code {
        Code::Signed => f32::from(bits as i8) + 0.5,
        Code::Unsigned => f32::from(bits) + 0.5,
    };
    let at = (f.to_bits() >> Tables::DECODE_SHIFT) as usize % LANES;
    let offset = f32::from_bits(tables.offset[at].to_bits() ^ (f.to_bits() & Tables::SIGN));
    (f * tables.slope[at] + offset) * scale
}

/// Interpolates between codes, adds a random number of 0 to 1, and rounds down. A positive sum of squares never becomes
/// 0, since an update would then divide by `eps` alone.
#[inline(always)]
fn encode_element(code: Code, x: f32, reciprocal: f32, random: u32) -> u8 {
    let tables = code.tables();
    let magnitude = x.abs() * reciprocal;
    let at = (magnitude.to_bits().max(Tables::LEAST) >> Tables::ENCODE_SHIFT) as usize % LANES;
    let lower = magnitude * tables.lower[0][at] + tables.lower[1][at];
    let upper = magnitude * tables.upper[0][at] + tables.upper[1][at];
    let position = lower.min(upper).min(tables.last);
    let random = f32::from_bits(0x3F80_0000 | random << 7);
    let q = (position + random) as i32;
    match code {
        Code::Signed => (q ^ (x.to_bits() as i32 >> 31)) as u8,
        Code::Unsigned => q.max((x.to_bits() as i32).min(1)) as u8,
    }
}
