//! Sum of squares and the first non-finite element of a slice.

use super::super::{Figures, LANES};

/// Adds the squares of consecutive elements to 16 f64 lanes, element `i` to lane `i % 16`, then folds the lanes as
/// a fixed tree. The square of an f32 is exact in f64, so only the order of additions matters, and this order suits
/// every vector width.
///
/// Slices sum differently than their concatenation: a block's figures are those of one call over the whole block.
pub(in super::super) struct Sum {
    lanes: [f64; LANES],
    next: usize,
}

impl Sum {
    pub(super) fn new() -> Sum {
        Sum { lanes: [0.0; LANES], next: 0 }
    }

    /// Goes on from lanes that have seen a multiple of 16 elements.
    pub(in super::super) fn resume(lanes: [f64; LANES]) -> Sum {
        Sum { lanes, next: 0 }
    }

    #[inline(always)]
    pub(in super::super) fn add(&mut self, x: f32) {
        let x = f64::from(x);
        self.lanes[self.next] += x * x;
        self.next = (self.next + 1) % LANES;
    }

    /// The figures, given a way to look at elements again.
    ///
    /// Every finite f32 squares to less than 2^256, so that fewer than 2^768 of them cannot overflow: the sum is
    /// finite exactly if every element is, and only a slice with bad news is read twice.
    pub(in super::super) fn finish(self, elements: impl Iterator<Item = f32>) -> Figures {
        let mut lanes = self.lanes;
        let mut width = LANES / 2;
        while width > 0 {
            for lane in 0..width {
                lanes[lane] += lanes[lane + width];
            }
            width /= 2;
        }
        if lanes[0].is_finite() {
            return Figures { sum_squares: lanes[0], first_nonfinite: None };
        }
        let sum_squares = if lanes[0].is_nan() { f64::NAN } else { f64::INFINITY };
        let first = elements.enumerate().find(|(_, x)| !x.is_finite()).map(|(index, _)| index as u32);
        Figures { sum_squares, first_nonfinite: first }
    }
}
