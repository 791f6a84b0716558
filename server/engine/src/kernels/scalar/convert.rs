//! The three element formats: conversions from bits to f32 and back.

use half::f16;

/// The only NaN that is ever stored, since instruction sets differ in the sign and payload of NaN results. Rounded to
/// f16 and bf16 it gives 0x7E00 and 0x7FC0.
pub(in super::super) const CANONICAL_NAN: f32 = f32::from_bits(0x7FC0_0000);

/// `x`, or the canonical NaN for any NaN.
#[inline(always)]
pub(in super::super) fn quiet(x: f32) -> f32 {
    if x.is_nan() { CANONICAL_NAN } else { x }
}

/// An element format.
pub(in super::super) trait Format {
    type Bits: Copy;

    /// Widens exactly. A NaN stays some NaN.
    fn widen(bits: Self::Bits) -> f32;

    /// Rounds to nearest, ties to even. Overflow goes to infinity, small values to denormals. `x` must have gone
    /// through [`quiet`].
    fn narrow(x: f32) -> Self::Bits;
}

pub(in super::super) struct F32;
pub(in super::super) struct F16;
pub(in super::super) struct Bf16;
/// No bits at all, for an image that is not written.
pub(in super::super) struct Nothing;

impl Format for F32 {
    type Bits = f32;

    #[inline(always)]
    fn widen(bits: f32) -> f32 {
        bits
    }

    #[inline(always)]
    fn narrow(x: f32) -> f32 {
        x
    }
}

impl Format for Nothing {
    type Bits = ();

    #[inline(always)]
    fn widen((): ()) -> f32 {
        0.0
    }

    #[inline(always)]
    fn narrow(_: f32) {}
}

/// `half`'s `const` conversions are its portable ones. Its other conversions would test for F16C on every element.
impl Format for F16 {
    type Bits = u16;

    #[inline(always)]
    fn widen(bits: u16) -> f32 {
        f16::from_bits(bits).to_f32_const()
    }

    #[inline(always)]
    fn narrow(x: f32) -> u16 {
        f16::from_f32_const(x).to_bits()
    }
}

/// bf16 is the upper half of an f32, so rounding is integer addition. The addend is half a unit less one, plus one
/// where the last kept bit is odd. Carries from the mantissa go into the exponent, up to infinity. (AVX512-BF16's own
/// conversion would flush denormals.)
impl Format for Bf16 {
    type Bits = u16;

    #[inline(always)]
    fn widen(bits: u16) -> f32 {
        f32::from_bits(u32::from(bits) << 16)
    }

    #[inline(always)]
    fn narrow(x: f32) -> u16 {
        let bits = x.to_bits();
        ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) as u16
    }
}
