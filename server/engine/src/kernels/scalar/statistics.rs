//! Sum of squares and the first non-finite element of a slice.

use super::super::isa::LANES;

/// Gradient statistics: the properties of a slice of gradients from which rank 0 decides a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Statistics {
    /// The sum of squares, infinite or NaN (always the same NaN) exactly if an element is not finite.
    pub sum_squares: f64,
    /// The index, inside the slice, of the first element that is infinite or NaN.
    pub first_nonfinite: Option<u32>,
}

impl Statistics {
    pub const NONE: Statistics = Statistics { sum_squares: 0.0, first_nonfinite: None };
}

/// The number of lanes, one for each 16-bit element of a 64-byte register.
pub(in super::super) const SUMS: usize = 2 * LANES;

/// Number of squares added in f32 before the sum is widened: 16 to a lane. Widening every square takes three times as
/// many instructions. A core then takes 0.12 ns an element, which is longer than the element's read from memory.
pub(in super::super) const TILE: usize = 16 * SUMS;

/// Least sum that is exact enough. Each of a block's 64 Ki squares may have lost 2^-150 by underflow in f32. All
/// together have then lost at most 2^-38 of the sum.
const LEAST: f64 = 1.0 / (1u128 << 96) as f64;

/// The sum of the squares of a slice's elements, which are added in their order.
///
/// Element `i` belongs to lane `i % 32`, an order that suits every vector width. A lane adds its squares in
/// f32 by fused multiply-add. After each [`TILE`] of elements it adds its f32 sum to a sum in f64. Rounding
/// leaves a relative error of some 1e-9 in a block, never more than 16 times 2^-24. The lanes are folded as a
/// fixed tree.
///
/// f32 holds no square of an element above 2^64 and few bits of one below 2^-63. If a sum is not finite or
/// below [`LEAST`], all is done again [without](Exact) f32.
///
/// The sums of two slices do not add up to the sum of both together. A block's statistics come from one call
/// over the whole block.
pub(in super::super) struct Sum {
    lanes: [f64; SUMS],
    tile: [f32; SUMS],
    next: usize,
}

impl Sum {
    pub(super) fn new() -> Sum {
        Sum::resume([0.0; SUMS])
    }

    /// Continues from the lanes' sums over a multiple of [`TILE`] elements.
    pub(in super::super) fn resume(lanes: [f64; SUMS]) -> Sum {
        Sum { lanes, tile: [0.0; SUMS], next: 0 }
    }

    #[inline(always)]
    pub(in super::super) fn add(&mut self, x: f32) {
        let lane = &mut self.tile[self.next % SUMS];
        *lane = x.mul_add(x, *lane);
        self.next += 1;
        if self.next == TILE {
            self.widen();
        }
    }

    fn widen(&mut self) {
        for (sum, tile) in self.lanes.iter_mut().zip(&mut self.tile) {
            *sum += f64::from(std::mem::take(tile));
        }
        self.next = 0;
    }

    /// The statistics; None if they must be taken by [`Exact`].
    pub(in super::super) fn finish(mut self) -> Option<Statistics> {
        self.widen();
        let sum_squares = fold(self.lanes);
        // A lane that became infinite or NaN stays so: where the sum is finite, every element was.
        (LEAST..f64::INFINITY)
            .contains(&sum_squares)
            .then_some(Statistics { sum_squares, first_nonfinite: None })
    }
}

/// The sum of squares in 16 lanes of f64, where the square of an f32 is exact. Neither a square nor a sum of fewer than
/// 2^768 squares can overflow. So the sum is finite exactly if every element is.
pub(in super::super) struct Exact {
    lanes: [f64; LANES],
    next: usize,
}

impl Exact {
    pub(super) fn new() -> Exact {
        Exact::resume([0.0; LANES])
    }

    /// Continues from the lanes' sums over a multiple of 16 elements.
    pub(in super::super) fn resume(lanes: [f64; LANES]) -> Exact {
        Exact { lanes, next: 0 }
    }

    #[inline(always)]
    pub(in super::super) fn add(&mut self, x: f32) {
        let x = f64::from(x);
        self.lanes[self.next] += x * x;
        self.next = (self.next + 1) % LANES;
    }

    /// Returns the statistics. `first_nonfinite` finds the first element that is not finite.
    pub(in super::super) fn finish(self, first_nonfinite: impl FnOnce() -> Option<u32>) -> Statistics {
        let sum = fold(self.lanes);
        if sum.is_finite() {
            return Statistics { sum_squares: sum, first_nonfinite: None };
        }
        let sum_squares = if sum.is_nan() { f64::NAN } else { f64::INFINITY };
        Statistics { sum_squares, first_nonfinite: first_nonfinite() }
    }
}

fn fold<const N: usize>(mut lanes: [f64; N]) -> f64 {
    let mut width = N / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
        width /= 2;
    }
    lanes[0]
}
