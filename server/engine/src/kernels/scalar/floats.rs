//! The loops over numbers that are f32, or widened to it as they are read, one element at a time.

use super::super::rules::{Rule, ScalarLoop, step_scalar};
use super::super::{Gradient, ImageMut, Scalars, State, low::CHUNK};
use super::convert::{Bf16, F16, F32, Format, Nothing, quiet};
use super::statistics::{Exact, Statistics, Sum};
use crate::memory::{Element, Source};

#[inline(never)]
pub(in super::super) fn update(scalars: &Scalars, gradient: Gradient, state: State, image: ImageMut) {
    update_parts(scalars, gradient, state, Some(image));
}

/// Runs [`update`]. If `image` is None, no image is made, and there are at most [`CHUNK`] elements.
pub(super) fn update_parts(scalars: &Scalars, gradient: Gradient, state: State, image: Option<ImageMut>) {
    scalars.run_scalar(Parts { gradient, state, image });
}

/// [`update_parts`] with a known rule.
struct Parts<'a> {
    gradient: Gradient<'a>,
    state: State<'a>,
    image: Option<ImageMut<'a>>,
}

impl ScalarLoop for Parts<'_> {
    fn run<R: Rule<f32>>(self, rule: R) {
        let Parts { gradient, state, image } = self;
        match gradient {
            Gradient::F32(g) => update_from::<R, F32>(rule, g, state, image),
            Gradient::F16(g) => update_from::<R, F16>(rule, g, state, image),
            Gradient::Bf16(g) => update_from::<R, Bf16>(rule, g, state, image),
        }
    }
}

fn update_from<R: Rule<f32>, G: Format<Bits: Element>>(
    rule: R,
    gradient: Source<G::Bits>,
    mut state: State,
    mut image: Option<ImageMut>,
) {
    gradient.pieces(|start, gradient| {
        let range = start..start + gradient.len();
        let state = state.slice(range.clone());
        match image.as_mut().map(|image| image.slice(range)) {
            Some(ImageMut::F32(i)) => update_elements::<R, G, F32>(rule, gradient, state, i),
            Some(ImageMut::F16(i)) => update_elements::<R, G, F16>(rule, gradient, state, i),
            Some(ImageMut::Bf16(i)) => update_elements::<R, G, Bf16>(rule, gradient, state, i),
            None => update_elements::<R, G, Nothing>(rule, gradient, state, &mut [(); CHUNK]),
        }
    });
}

fn update_elements<R: Rule<f32>, G: Format, I: Format>(
    rule: R,
    gradient: &[G::Bits],
    state: State,
    image: &mut [I::Bits],
) {
    let count = gradient.len();
    let (master, image) = (&mut state.master[..count], &mut image[..count]);
    for i in 0..count {
        let old = master[i];
        let mut slots = [0.0; 2];
        if R::SLOTS > 0 {
            slots[0] = state.first[i];
        }
        if R::SLOTS > 1 {
            slots[1] = state.second[i];
        }
        let (new, slots, ahead) = step_scalar(rule, G::widen(gradient[i]), old, slots);
        if R::SLOTS > 0 {
            state.first[i] = quiet(slots[0]);
        }
        if R::SLOTS > 1 {
            state.second[i] = quiet(slots[1]);
        }
        master[i] = quiet(new);
        let emitted = if rule.looks_ahead() { new - ahead } else { new };
        image[i] = I::narrow(quiet(emitted));
    }
}

pub(in super::super) fn widen(gradient: Gradient, accumulator: &mut [f32]) {
    combine(gradient, accumulator, |_, g| g);
}

pub(in super::super) fn accumulate(gradient: Gradient, accumulator: &mut [f32]) {
    combine(gradient, accumulator, |sum, g| sum + g);
}

fn combine(gradient: Gradient, accumulator: &mut [f32], with: impl Fn(f32, f32) -> f32) {
    fn run<G: Format<Bits: Element>>(
        gradient: Source<G::Bits>,
        accumulator: &mut [f32],
        with: impl Fn(f32, f32) -> f32,
    ) {
        gradient.pieces(|start, gradient| {
            for (sum, &g) in accumulator[start..].iter_mut().zip(gradient) {
                *sum = quiet(with(*sum, G::widen(g)));
            }
        });
    }
    match gradient {
        Gradient::F32(g) => run::<F32>(g, accumulator, with),
        Gradient::F16(g) => run::<F16>(g, accumulator, with),
        Gradient::Bf16(g) => run::<Bf16>(g, accumulator, with),
    }
}

pub(in super::super) fn statistics(gradient: Gradient) -> Statistics {
    resume_statistics(Sum::new(), 0, gradient).unwrap_or_else(|| resume_exact(Exact::new(), 0, gradient))
}

/// The statistics of `gradient`, where `sum` holds all elements before `done`.
pub(in super::super) fn resume_statistics(sum: Sum, done: usize, gradient: Gradient) -> Option<Statistics> {
    fn run<G: Format<Bits: Element>>(mut sum: Sum, gradient: Source<G::Bits>) -> Option<Statistics> {
        gradient.pieces(|_, gradient| gradient.iter().for_each(|&g| sum.add(G::widen(g))));
        sum.finish()
    }
    match gradient.slice(done..gradient.len()) {
        Gradient::F32(g) => run::<F32>(sum, g),
        Gradient::F16(g) => run::<F16>(sum, g),
        Gradient::Bf16(g) => run::<Bf16>(sum, g),
    }
}

/// The statistics of `gradient`, where `sum` holds all elements before `done`.
pub(in super::super) fn resume_exact(sum: Exact, done: usize, gradient: Gradient) -> Statistics {
    fn run<G: Format<Bits: Element>>(mut sum: Exact, done: usize, gradient: Source<G::Bits>) -> Statistics {
        let rest = gradient.slice(done..gradient.len());
        rest.pieces(|_, gradient| gradient.iter().for_each(|&g| sum.add(G::widen(g))));
        sum.finish(|| first_nonfinite::<G>(gradient))
    }
    match gradient {
        Gradient::F32(g) => run::<F32>(sum, done, g),
        Gradient::F16(g) => run::<F16>(sum, done, g),
        Gradient::Bf16(g) => run::<Bf16>(sum, done, g),
    }
}

fn first_nonfinite<G: Format<Bits: Element>>(gradient: Source<G::Bits>) -> Option<u32> {
    let mut first = None;
    gradient.pieces(|start, gradient| {
        let found = || gradient.iter().position(|&g| !G::widen(g).is_finite());
        first = first.or_else(|| found().map(|index| (start + index) as u32));
    });
    first
}

pub(in super::super) fn accumulate_statistics(gradient: Gradient, accumulator: &mut [f32]) -> Statistics {
    accumulate(gradient, accumulator);
    statistics(Gradient::f32(accumulator))
}

pub(in super::super) fn cast(source: &[f32], image: ImageMut) {
    fn run<I: Format>(source: &[f32], image: &mut [I::Bits]) {
        for (bits, &x) in image.iter_mut().zip(source) {
            *bits = I::narrow(quiet(x));
        }
    }
    match image {
        ImageMut::F32(i) => run::<F32>(source, i),
        ImageMut::F16(i) => run::<F16>(source, i),
        ImageMut::Bf16(i) => run::<Bf16>(source, i),
    }
}
