//! The rates and the amended image, one element at a time: **this file is their specification**, as `rules.rs` is that of
//! the rules.

use super::super::{Amended, Gradient, ImageMut, Kept, Missing, isa::LANES, slices::RATE_GROUP};
use super::convert::{Bf16, F16, F32, Format, quiet};
use crate::memory::{Element, Source};

/// An element's step is divided by this.
#[inline(always)]
fn denominator(s: &Amended, second: f32) -> f32 {
    second.sqrt() * s.inverse_root_correction + s.eps
}

/// One rate from the sums of the squares of a group's denominators: sum i has the elements i, i + 16, i + 32 and i + 48.
/// The vector loops call it, too.
#[inline(always)]
pub(in super::super) fn rate(s: &Amended, sums: [f32; LANES]) -> f32 {
    // Without loops of variable length this stays in registers.
    let eight: [f32; 8] = std::array::from_fn(|i| sums[i] + sums[i + 8]);
    let four: [f32; 4] = std::array::from_fn(|i| eight[i] + eight[i + 4]);
    let two: [f32; 2] = std::array::from_fn(|i| four[i] + four[i + 2]);
    quiet(s.rate / ((two[0] + two[1]) * (1.0 / RATE_GROUP as f32)).sqrt())
}

fn group_rate(s: &Amended, second: &[f32]) -> f32 {
    let mut sums = [0.0; LANES];
    for part in second.chunks(LANES) {
        for (sum, &v) in sums.iter_mut().zip(part) {
            let d = denominator(s, v);
            *sum += d * d;
        }
    }
    rate(s, sums)
}

/// See [`super::super::rates`].
pub(in super::super) fn rates(s: &Amended, second: &[f32], rates: &mut [f32]) {
    for (rate, group) in rates.iter_mut().zip(second.chunks(RATE_GROUP)) {
        *rate = group_rate(s, group);
    }
}

/// See [`super::super::amend`].
pub(in super::super) fn amend(
    s: &Amended,
    missing: Missing,
    gradient: Gradient,
    kept: Kept,
    mut image: ImageMut,
) {
    for start in (0..kept.master.len()).step_by(RATE_GROUP) {
        let group = start..start + RATE_GROUP;
        let (kept, gradient) = (kept.slice(group.clone()), gradient.slice(group.clone()));
        match image.slice(group) {
            ImageMut::F32(i) => amend_group::<F32>(s, missing, gradient, kept, i),
            ImageMut::F16(i) => amend_group::<F16>(s, missing, gradient, kept, i),
            ImageMut::Bf16(i) => amend_group::<Bf16>(s, missing, gradient, kept, i),
        }
    }
}

fn amend_group<I: Format>(
    s: &Amended,
    missing: Missing,
    gradient: Gradient,
    kept: Kept,
    image: &mut [I::Bits],
) {
    let rate = group_rate(s, kept.second);
    for (i, bits) in image.iter_mut().enumerate() {
        let z = kept.master[i];
        let ahead = (s.mean * kept.first[i]) / denominator(s, kept.second[i]) + s.weight * z;
        *bits = I::narrow(quiet(z - ahead));
    }
    match gradient {
        Gradient::F32(g) => subtract::<F32, I>(rate, missing, g, image),
        Gradient::F16(g) => subtract::<F16, I>(rate, missing, g, image),
        Gradient::Bf16(g) => subtract::<Bf16, I>(rate, missing, g, image),
    }
}

/// Subtracts the step that the image lacks. A worker does this with the image that it has.
fn subtract<G: Format<Bits: Element>, I: Format>(
    rate: f32,
    missing: Missing,
    gradient: Source<G::Bits>,
    image: &mut [I::Bits],
) {
    gradient.pieces(|start, gradient| {
        for (bits, &g) in image[start..].iter_mut().zip(gradient) {
            let step = clamp(rate * (G::widen(g) * missing.multiplier), missing.limit);
            *bits = I::narrow(quiet(I::widen(*bits) - step));
        }
    });
}

/// The nearest number from -limit to limit. A NaN stays one.
#[inline(always)]
fn clamp(step: f32, limit: f32) -> f32 {
    if step > limit {
        limit
    } else if step < -limit {
        -limit
    } else {
        step
    }
}
