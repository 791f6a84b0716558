//! The 8-bit code: its values, and the constants from which the kernels compute them.

use super::super::isa::LANES;
use longshore_proto::{Moment, Rule};

/// The dynamic code of 8-bit moments, after Dettmers et al., "8-bit Optimizers via Block-wise Quantization"
/// (2021).
///
/// A magnitude code `q` counts in binary as the value does in decimal. With `i = floor(log2 q)`,
///
/// ```text
/// D(0) = 0        D(q) = 10^i * (1 + 9 * (q - 2^i) / 2^i)        value = scale * D(q) / D(top)
/// ```
///
/// so `D(2^i) = 10^i`, and decade `i` has `2^i` equal steps: half of all codes are for the largest decade. The second
/// moment has no sign. The spare bit gives it an eighth decade and twice the steps in the others.
///
/// | | code byte | `q` | `top` | smallest / largest | largest step / value in the upper decade |
/// |---|---|---|---|---|---|
/// | `Signed` | `q`, or `!q` for a negative value | 0 to 127 | 127 | 1.0e-7 | 14 % |
/// | `Unsigned` | `q` | 0 to 255 | 255 | 1.0e-8 | 7 % |
///
/// bitsandbytes' map has the same decades and steps, with codes in the middle of the steps, and one more code for +1.
/// Here codes are at the ends of the steps. The inverse is then one line per decade, and at each magnitude the lowest
/// of all these lines, so encoding takes few operations. The largest magnitude of a block is exact in either sign.
/// bitsandbytes shrinks a negative one by 0.7 % in each step.
///
/// Both zeros (bytes 0 and 255) of the signed code decode to zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Code {
    Signed,
    Unsigned,
}

impl Code {
    /// The code of a rule's state slot 0 or 1. Sums of squares have no sign; the code of a slot without state is not used.
    pub fn of(rule: Rule, slot: usize) -> Code {
        match rule.moments().get(slot) {
            Some(Moment::Signed) => Code::Signed,
            Some(Moment::Squares) | None => Code::Unsigned,
        }
    }

    #[inline(always)]
    pub(in super::super) const fn tables(self) -> &'static Tables {
        match self {
            Code::Signed => &SIGNED,
            Code::Unsigned => &UNSIGNED,
        }
    }
}

/// The straight lines that the code and its inverse consist of. Each table is indexed by four bits of an f32's exponent
/// field.
pub(in super::super) struct Tables {
    /// `D(q) / D(top) = slope * f + offset` with `f = q + 0.5`. The index is the low four bits of the exponent of `f`.
    pub(in super::super) slope: [f32; LANES],
    pub(in super::super) offset: [f32; LANES],
    /// Lines of the inverse, by the exponent of a normalised magnitude without its last bit. An index covers a factor
    /// of 4, within which is at most one bend, so two lines are enough. Both lines are 1 too low, because a random
    /// number of 1 to 2 is added before truncation.
    pub(in super::super) lower: [[f32; LANES]; 2],
    pub(in super::super) upper: [[f32; LANES]; 2],
    /// `top - 1`
    pub(in super::super) last: f32,
}

impl Tables {
    /// Magnitudes below this bound (2^-31) use the bound's line, which goes through zero.
    pub(in super::super) const LEAST: u32 = 96 << 23;
    pub(in super::super) const SIGN: u32 = 1 << 31;
    /// Right shifts from an exponent field to the index of `slope` and `offset`, and to the index of the
    /// inverse.
    pub(in super::super) const DECODE_SHIFT: u32 = 23;
    pub(in super::super) const ENCODE_SHIFT: u32 = 24;
    /// A scale below the smallest normal number is taken for 0, since its reciprocal would overflow.
    pub(in super::super) const LEAST_SCALE: u32 = 1 << 23;
}

static SIGNED: Tables = tables(7);
static UNSIGNED: Tables = tables(8);

const fn tables(decades: usize) -> Tables {
    let top = ((1 << decades) - 1) as f64;
    let half = (1 << (decades - 1)) as f64;
    let largest = power(10.0, decades - 1) * (1.0 + 9.0 * (top - half) / half);
    let mut tables = Tables {
        slope: [0.0; LANES],
        offset: [0.0; LANES],
        lower: [[0.0; LANES]; 2],
        upper: [[0.0; LANES]; 2],
        last: (top - 1.0) as f32,
    };
    let mut decade = 0;
    while decade < decades {
        let at = (127 + decade) % LANES;
        let ten = power(10.0, decade) / largest;
        let slope = 9.0 * ten / power(2.0, decade);
        tables.slope[at] = slope as f32;
        tables.offset[at] = (-8.0 * ten - 0.5 * slope) as f32;
        if decade + 1 == decades {
            // The top is 1 to the last bit, since 1 - x is exact for x of 0.5 to 2.
            tables.offset[at] = 1.0 - (top + 0.5) as f32 * slope as f32;
        }
        decade += 1;
    }
    let mut at = 0;
    while at < LANES {
        let least = power(0.5, 31) * power(4.0, at);
        tables.lower = set(tables.lower, at, lowest_line(least, decades, largest));
        tables.upper = set(tables.upper, at, lowest_line(4.0 * least, decades, largest));
        at += 1;
    }
    tables
}

const fn set(mut lines: [[f32; LANES]; 2], at: usize, line: (f64, f64)) -> [[f32; LANES]; 2] {
    lines[0][at] = line.0 as f32;
    lines[1][at] = (line.1 - 1.0) as f32;
    lines
}

/// Returns slope and offset of the line from magnitude to `q` that is lowest at `magnitude`. The lines are one through
/// zero, and one for each decade.
const fn lowest_line(magnitude: f64, decades: usize, largest: f64) -> (f64, f64) {
    let mut lowest = (largest, 0.0);
    let mut decade = 0;
    while decade < decades {
        let steps = power(2.0, decade);
        let line = (largest * steps / (9.0 * power(10.0, decade)), steps * 8.0 / 9.0);
        if line.0 * magnitude + line.1 < lowest.0 * magnitude + lowest.1 {
            lowest = line;
        }
        decade += 1;
    }
    lowest
}

const fn power(base: f64, exponent: usize) -> f64 {
    let mut result = 1.0;
    let mut left = exponent;
    while left > 0 {
        result *= base;
        left -= 1;
    }
    result
}
