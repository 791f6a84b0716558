//! The rates and the amended image, 16 elements at a time. They do what `scalar/amend.rs` specifies, operation for
//! operation.

use super::super::scalar::{
    amend::rate,
    convert::{Bf16, F16, F32},
};
use super::super::{Amended, Gradient, ImageMut, Kept, Missing, isa::LANES, slices::RATE_GROUP};
use super::lanes::{Lanes, LanesFormat};
use crate::memory::Source;

const PARTS: usize = RATE_GROUP / LANES;

/// The constants, splatted.
#[derive(Clone, Copy)]
struct Constants<V> {
    mean: V,
    weight: V,
    inverse_root_correction: V,
    eps: V,
    multiplier: V,
    limit: V,
    opposite_limit: V,
}

impl<V: Lanes> Constants<V> {
    #[inline(always)]
    unsafe fn new(s: &Amended, missing: Missing) -> Self {
        Constants {
            mean: V::splat(s.mean),
            weight: V::splat(s.weight),
            inverse_root_correction: V::splat(s.inverse_root_correction),
            eps: V::splat(s.eps),
            multiplier: V::splat(missing.multiplier),
            limit: V::splat(missing.limit),
            opposite_limit: V::splat(-missing.limit),
        }
    }

    /// The denominators of a group, and its rate.
    #[inline(always)]
    unsafe fn group(self, s: &Amended, second: *const f32) -> ([V; PARTS], f32) {
        let (mut parts, mut sum) = ([self.eps; PARTS], V::splat(0.0));
        for (part, d) in parts.iter_mut().enumerate() {
            *d = V::load(second.add(part * LANES)).sqrt().mul(self.inverse_root_correction).add(self.eps);
            sum = sum.add(d.mul(*d));
        }
        let mut sums = [0.0; LANES];
        sum.store(sums.as_mut_ptr());
        (parts, rate(s, sums))
    }
}

/// See [`super::super::rates`].
#[inline(always)]
pub(in super::super) unsafe fn rates<V: Lanes>(s: &Amended, second: &[f32], rates: &mut [f32]) {
    let constants = Constants::<V>::new(s, Missing { multiplier: 0.0, limit: 0.0 });
    for (rate, group) in rates.iter_mut().zip(second.chunks_exact(RATE_GROUP)) {
        (_, *rate) = constants.group(s, group.as_ptr());
    }
}

/// See [`super::super::amend`].
#[inline(always)]
pub(in super::super) unsafe fn amend<V: Lanes>(
    s: &Amended,
    missing: Missing,
    gradient: Gradient,
    kept: Kept,
    image: ImageMut,
) {
    match gradient {
        Gradient::F32(g) => amend_from::<V, F32>(s, missing, g, kept, image),
        Gradient::F16(g) => amend_from::<V, F16>(s, missing, g, kept, image),
        Gradient::Bf16(g) => amend_from::<V, Bf16>(s, missing, g, kept, image),
    }
}

#[inline(always)]
unsafe fn amend_from<V: Lanes, G: LanesFormat>(
    s: &Amended,
    missing: Missing,
    gradient: Source<G::Bits>,
    kept: Kept,
    image: ImageMut,
) {
    let aligned = image.elements_to_alignment(V::STREAM_ALIGNMENT) == 0;
    match image {
        ImageMut::F32(i) => amend_loop::<V, G, F32>(s, missing, gradient, kept, i, aligned),
        ImageMut::F16(i) => amend_loop::<V, G, F16>(s, missing, gradient, kept, i, aligned),
        ImageMut::Bf16(i) => amend_loop::<V, G, Bf16>(s, missing, gradient, kept, i, aligned),
    }
    if aligned {
        V::fence();
    }
}

/// All slices have one length, a multiple of a group. An image that is aligned is written past the caches.
#[inline(always)]
unsafe fn amend_loop<V: Lanes, G: LanesFormat, I: LanesFormat>(
    s: &Amended,
    missing: Missing,
    gradient: Source<G::Bits>,
    kept: Kept,
    image: &mut [I::Bits],
    aligned: bool,
) {
    let constants = Constants::<V>::new(s, missing);
    let (gradient_at, image_at) = (gradient.as_ptr(), image.as_mut_ptr());
    for start in (0..kept.master.len()).step_by(RATE_GROUP) {
        let (denominators, rate) = constants.group(s, kept.second.as_ptr().add(start));
        let rate = V::splat(rate);
        for (part, d) in denominators.into_iter().enumerate() {
            let i = start + part * LANES;
            let z = V::load(kept.master.as_ptr().add(i));
            let known = constants.mean.mul(V::load(kept.first.as_ptr().add(i)));
            let weight = I::round(z.sub(known.div(d).add(constants.weight.mul(z))).quiet());
            let g: V = G::load(gradient_at.add(i));
            let step = rate.mul(g.mul(constants.multiplier));
            let step = constants.opposite_limit.max(constants.limit.min(step));
            let amended = weight.sub(step).quiet();
            if aligned { I::stream(amended, image_at.add(i)) } else { I::store(amended, image_at.add(i)) }
        }
    }
}
