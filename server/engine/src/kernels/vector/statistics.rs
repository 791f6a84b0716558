//! Sums over ranks and micro-steps, and statistics of a gradient that was summed or came alone.

use super::super::scalar::convert::{Bf16, F16, F32};
use super::super::scalar::{self, Exact, SUMS, Sum, TILE};
use super::super::{Gradient, Statistics, isa::LANES};
use super::lanes::{Lanes, LanesFormat};
use crate::memory::Source;

/// Prefetch distance of [`statistics`]. By itself a core prefetches to the end of a page and no further. A Xeon's core
/// reads 14.7 GB/s with this distance, and 12.0 without. Four runs of a block, read in turn, gave the Xeon 14.9, but a
/// Zen 4 13 instead of 26.
const PREFETCH_BYTES: usize = 4 * 1024;

#[inline(always)]
pub(in super::super) unsafe fn accumulate<V: Lanes>(gradient: Gradient, accumulator: &mut [f32]) {
    #[inline(always)]
    unsafe fn run<V: Lanes, G: LanesFormat>(gradient: Source<G::Bits>, accumulator: &mut [f32], end: usize) {
        for i in (0..end).step_by(LANES) {
            add::<V, G>(gradient.as_ptr().add(i), accumulator.as_mut_ptr().add(i));
        }
    }
    let end = gradient.len() - gradient.len() % LANES;
    match gradient {
        Gradient::F32(g) => run::<V, F32>(g, accumulator, end),
        Gradient::F16(g) => run::<V, F16>(g, accumulator, end),
        Gradient::Bf16(g) => run::<V, Bf16>(g, accumulator, end),
    }
    scalar::accumulate(gradient.slice(end..gradient.len()), &mut accumulator[end..]);
}

#[inline(always)]
unsafe fn add<V: Lanes, G: LanesFormat>(gradient: *const G::Bits, accumulator: *mut f32) -> V {
    let sum = V::load(accumulator).add(G::load(gradient)).quiet();
    sum.store(accumulator);
    sum
}

#[inline(always)]
pub(in super::super) unsafe fn accumulate_statistics<V: Lanes>(
    gradient: Gradient,
    accumulator: &mut [f32],
) -> Statistics {
    #[inline(always)]
    unsafe fn run<V: Lanes, G: LanesFormat>(
        gradient: Source<G::Bits>,
        accumulator: &mut [f32],
        end: usize,
    ) -> [f64; SUMS] {
        let (mut low, mut high) = (V::no_sums(), V::no_sums());
        for tile in (0..end).step_by(TILE) {
            let (mut first, mut second) = (V::splat(0.0), V::splat(0.0));
            for i in (tile..tile + TILE).step_by(SUMS) {
                let (from, to) = (gradient.as_ptr().add(i), accumulator.as_mut_ptr().add(i));
                first = add::<V, G>(from, to).add_square(first);
                second = add::<V, G>(from.add(LANES), to.add(LANES)).add_square(second);
            }
            (low, high) = (first.add_to(low), second.add_to(high));
        }
        in_order([V::spill(low), V::spill(high)], false)
    }
    let end = gradient.len() - gradient.len() % TILE;
    let sums = match gradient {
        Gradient::F32(g) => run::<V, F32>(g, accumulator, end),
        Gradient::F16(g) => run::<V, F16>(g, accumulator, end),
        Gradient::Bf16(g) => run::<V, Bf16>(g, accumulator, end),
    };
    accumulate::<V>(gradient.slice(end..gradient.len()), &mut accumulator[end..]);
    finish::<V>(sums, end, Gradient::f32(accumulator))
}

#[inline(always)]
pub(in super::super) unsafe fn statistics<V: Lanes>(gradient: Gradient) -> Statistics {
    #[inline(always)]
    unsafe fn run<V: Lanes, G: LanesFormat>(gradient: Source<G::Bits>, end: usize) -> [f64; SUMS] {
        let (mut low, mut high) = (V::no_sums(), V::no_sums());
        let from = gradient.as_ptr();
        for tile in (0..end).step_by(TILE) {
            let (mut first, mut second) = (V::splat(0.0), V::splat(0.0));
            for i in (tile..tile + TILE).step_by(SUMS) {
                let at = from.add(i);
                V::prefetch(at.cast::<u8>().wrapping_add(PREFETCH_BYTES));
                let [one, other] = G::load_two::<V>(at);
                (first, second) = (one.add_square(first), other.add_square(second));
            }
            (low, high) = (first.add_to(low), second.add_to(high));
        }
        in_order([V::spill(low), V::spill(high)], G::INTERLEAVED)
    }
    let end = gradient.len() - gradient.len() % TILE;
    let sums = match gradient {
        Gradient::F32(g) => run::<V, F32>(g, end),
        Gradient::F16(g) => run::<V, F16>(g, end),
        Gradient::Bf16(g) => run::<V, Bf16>(g, end),
    };
    finish::<V>(sums, end, gradient)
}

/// Puts the sums of two loads in the order of their indices.
fn in_order(loads: [[f64; LANES]; 2], interleaved: bool) -> [f64; SUMS] {
    std::array::from_fn(|lane| {
        if interleaved { loads[lane % 2][lane / 2] } else { loads[lane / LANES][lane % LANES] }
    })
}

/// The statistics of `gradient`, where `sums` hold all elements before `end`.
#[inline(always)]
unsafe fn finish<V: Lanes>(sums: [f64; SUMS], end: usize, gradient: Gradient) -> Statistics {
    match scalar::resume_statistics(Sum::resume(sums), end, gradient) {
        Some(statistics) => statistics,
        None => exact::<V>(gradient),
    }
}

/// Computes the statistics in f64, without f32 sums in between.
#[inline(always)]
unsafe fn exact<V: Lanes>(gradient: Gradient) -> Statistics {
    #[inline(always)]
    unsafe fn run<V: Lanes, G: LanesFormat>(gradient: Source<G::Bits>, end: usize) -> V::Sums {
        let mut sums = V::no_sums();
        for i in (0..end).step_by(LANES) {
            sums = G::load::<V>(gradient.as_ptr().add(i)).add_exact_square(sums);
        }
        sums
    }
    let end = gradient.len() - gradient.len() % LANES;
    let sums = match gradient {
        Gradient::F32(g) => run::<V, F32>(g, end),
        Gradient::F16(g) => run::<V, F16>(g, end),
        Gradient::Bf16(g) => run::<V, Bf16>(g, end),
    };
    scalar::resume_exact(Exact::resume(V::spill(sums)), end, gradient)
}
