//! The loops over numbers that are f32, or brought to it in the loop, 16 elements at a time.

use super::super::scalar::{
    self,
    convert::{Bf16, F16, F32, Nothing},
};
use super::super::{
    Code, Gradient, ImageMut, Scalars, State,
    isa::LANES,
    low::{CHUNK, InLoop},
    rules::{Loop, Rule},
};
use super::lanes::{Lanes, LanesFormat};
use super::moments::{Coded, Floats, Moments, Rounded, prefetch};
use crate::memory::Source;

/// The loops of updates as functions of their instruction set. Both `update` and `update_low` call them, so that
/// there is one copy of all rules in all formats.
pub(in super::super) trait Kernels: Lanes {
    unsafe fn update_floats(s: &Scalars, gradient: Gradient, state: State, image: Option<ImageMut>);
    unsafe fn update_low_moments(
        s: &Scalars,
        gradient: Gradient,
        master: &mut [f32],
        moments: InLoop,
        image: Option<ImageMut>,
    );
}

#[inline(always)]
pub(in super::super) unsafe fn update<V: Kernels>(
    scalars: &Scalars,
    gradient: Gradient,
    mut state: State,
    mut image: ImageMut,
) {
    let count = gradient.len();
    let start = image.elements_to_alignment(V::STREAM_ALIGNMENT);
    let end = count - (count - start) % LANES;
    if start > 0 {
        scalar::update(scalars, gradient.slice(0..start), state.slice(0..start), image.slice(0..start));
    }
    if start < end {
        let middle = start..end;
        let image = Some(image.slice(middle.clone()));
        V::update_floats(scalars, gradient.slice(middle.clone()), state.slice(middle), image);
        V::fence();
    }
    if end < count {
        let rest = end..count;
        scalar::update(scalars, gradient.slice(rest.clone()), state.slice(rest.clone()), image.slice(rest));
    }
}

/// Takes a multiple of 16 elements and an image aligned for streaming; without an image, up to [`CHUNK`] elements.
#[inline(always)]
pub(in super::super) unsafe fn update_floats<V: Lanes>(
    scalars: &Scalars,
    gradient: Gradient,
    mut state: State,
    image: Option<ImageMut>,
) {
    let moments = Floats::new(&mut state);
    update_middle::<V, Floats>(scalars, gradient, state.master, moments, image);
}

/// Updates low-precision moments, with the lengths and alignment of [`update_floats`].
#[inline(always)]
pub(in super::super) unsafe fn update_low_moments<V: Lanes>(
    scalars: &Scalars,
    gradient: Gradient,
    master: &mut [f32],
    moments: InLoop,
    image: Option<ImageMut>,
) {
    match moments {
        InLoop::Halves(halves) => {
            update_middle::<V, Rounded<V>>(scalars, gradient, master, Rounded::new(halves), image);
        }
        InLoop::Codes(codes) => {
            let codes = Coded::new(codes, Code::of(scalars.rule(), 0));
            update_middle::<V, Coded<V>>(scalars, gradient, master, codes, image);
        }
    }
}

#[inline(always)]
unsafe fn update_middle<V: Lanes, M: Moments<V>>(
    scalars: &Scalars,
    gradient: Gradient,
    master: &mut [f32],
    moments: M,
    image: Option<ImageMut>,
) {
    scalars.run(Middle { gradient, master, moments, image });
}

/// [`update_middle`] with a known rule.
struct Middle<'a, M> {
    gradient: Gradient<'a>,
    master: &'a mut [f32],
    moments: M,
    image: Option<ImageMut<'a>>,
}

impl<V: Lanes, M: Moments<V>> Loop<V> for Middle<'_, M> {
    #[inline(always)]
    unsafe fn run<R: Rule<V>>(self, rule: R) {
        let Middle { gradient, master, moments, image } = self;
        match gradient {
            Gradient::F32(g) => update_from::<V, R, M, F32>(rule, g, master, moments, image),
            Gradient::F16(g) => update_from::<V, R, M, F16>(rule, g, master, moments, image),
            Gradient::Bf16(g) => update_from::<V, R, M, Bf16>(rule, g, master, moments, image),
        }
    }
}

#[inline(always)]
unsafe fn update_from<V: Lanes, R: Rule<V>, M: Moments<V>, G: LanesFormat>(
    rule: R,
    gradient: Source<G::Bits>,
    master: &mut [f32],
    moments: M,
    image: Option<ImageMut>,
) {
    match image {
        Some(ImageMut::F32(i)) => update_loop::<V, R, M, G, F32>(rule, gradient, master, moments, i),
        Some(ImageMut::F16(i)) => update_loop::<V, R, M, G, F16>(rule, gradient, master, moments, i),
        Some(ImageMut::Bf16(i)) => update_loop::<V, R, M, G, Bf16>(rule, gradient, master, moments, i),
        None => update_loop::<V, R, M, G, Nothing>(rule, gradient, master, moments, &mut [(); CHUNK]),
    }
}

/// The fused pass. All slices have one length, a multiple of 16, and the image is aligned for streaming.
///
/// Only the image is written without being read before. So a streaming store saves the read of the image's cache lines:
/// 28 bytes of traffic a parameter instead of 30. AdamW in bf16 on a Zen 5 server takes 0.448 ns a parameter instead of
/// 0.477 (AVX-512).
#[inline(always)]
unsafe fn update_loop<V: Lanes, R: Rule<V>, M: Moments<V>, G: LanesFormat, I: LanesFormat>(
    rule: R,
    gradient: Source<G::Bits>,
    master: &mut [f32],
    moments: M,
    image: &mut [I::Bits],
) {
    let gradient_at = gradient.as_ptr();
    let (master_at, image_at) = (master.as_mut_ptr(), image.as_mut_ptr());
    let ahead = V::ahead();
    for i in (0..gradient.len()).step_by(LANES) {
        if ahead > 0 {
            prefetch::<V, _>(gradient_at, i, ahead);
            prefetch::<V, _>(master_at.cast_const(), i, ahead);
            moments.prefetch(i, R::SLOTS, ahead);
        }
        let old = V::load(master_at.add(i));
        let (new, [first, second], ahead_by) =
            rule.step(G::load(gradient_at.add(i)), old, moments.load(i, R::SLOTS, R::CODE));
        let [new, first, second] = V::quiet_all([new, first, second]);
        moments.store(i, R::SLOTS, [first, second]);
        new.store(master_at.add(i));
        let emitted = if rule.looks_ahead() { new.sub(ahead_by).quiet() } else { new };
        I::stream(emitted, image_at.add(i));
    }
}

#[inline(always)]
pub(in super::super) unsafe fn widen<V: Lanes>(gradient: Gradient, accumulator: &mut [f32]) {
    #[inline(always)]
    unsafe fn run<V: Lanes, G: LanesFormat>(gradient: Source<G::Bits>, accumulator: &mut [f32], end: usize) {
        for i in (0..end).step_by(LANES) {
            G::load::<V>(gradient.as_ptr().add(i)).quiet().store(accumulator.as_mut_ptr().add(i));
        }
    }
    let end = gradient.len() - gradient.len() % LANES;
    match gradient {
        Gradient::F32(g) => run::<V, F32>(g, accumulator, end),
        Gradient::F16(g) => run::<V, F16>(g, accumulator, end),
        Gradient::Bf16(g) => run::<V, Bf16>(g, accumulator, end),
    }
    scalar::widen(gradient.slice(end..gradient.len()), &mut accumulator[end..]);
}

#[inline(always)]
pub(in super::super) unsafe fn cast<V: Lanes>(source: &[f32], mut image: ImageMut) {
    #[inline(always)]
    unsafe fn run<V: Lanes, I: LanesFormat>(source: &[f32], image: &mut [I::Bits], end: usize) {
        for i in (0..end).step_by(LANES) {
            I::store(V::load(source.as_ptr().add(i)).quiet(), image.as_mut_ptr().add(i));
        }
    }
    let end = source.len() - source.len() % LANES;
    match &mut image {
        ImageMut::F32(i) => run::<V, F32>(source, i, end),
        ImageMut::F16(i) => run::<V, F16>(source, i, end),
        ImageMut::Bf16(i) => run::<V, Bf16>(source, i, end),
    }
    scalar::cast(&source[end..], image.slice(end..source.len()));
}
