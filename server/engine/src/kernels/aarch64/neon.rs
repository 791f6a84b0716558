//! Sixteen lanes are four NEON registers. Advanced SIMD on AArch64 is IEEE-754 throughout (denormals, division,
//! square root), so unlike on 32-bit Arm nothing needs care.

#![allow(unsafe_code, unsafe_op_in_unsafe_fn)] // The contract of every function here is that of `Lanes`.

use std::arch::aarch64::*;

use super::super::scalar::convert::CANONICAL_NAN;
use super::super::vector::{self, Lanes, entry_points};
use super::super::{Figures, Gradient, ImageMut, LANES, Scalars, State};

entry_points!(Neon, "neon");

#[derive(Clone, Copy)]
struct Neon([float32x4_t; 4]);

/// Applies a function to each register of one or two operands.
macro_rules! each {
    ($function:path, $a:expr) => {
        [$function($a[0]), $function($a[1]), $function($a[2]), $function($a[3])]
    };
    ($function:path, $a:expr, $b:expr) => {
        [$function($a[0], $b[0]), $function($a[1], $b[1]), $function($a[2], $b[2]), $function($a[3], $b[3])]
    };
}

impl Lanes for Neon {
    type Half = [uint16x4_t; 4];
    type Sums = [float64x2_t; 8];

    /// Non-temporal pairs (STNP) are a hint that the cores at hand ignore: ordinary stores.
    const STREAM_ALIGNMENT: usize = 1;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Neon([vdupq_n_f32(x); 4])
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        Neon([vld1q_f32(from), vld1q_f32(from.add(4)), vld1q_f32(from.add(8)), vld1q_f32(from.add(12))])
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        vst1q_f32(to, self.0[0]);
        vst1q_f32(to.add(4), self.0[1]);
        vst1q_f32(to.add(8), self.0[2]);
        vst1q_f32(to.add(12), self.0[3]);
    }

    #[inline(always)]
    unsafe fn stream(self, to: *mut f32) {
        self.store(to);
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        Neon(each!(vaddq_f32, self.0, other.0))
    }

    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        Neon(each!(vsubq_f32, self.0, other.0))
    }

    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        Neon(each!(vmulq_f32, self.0, other.0))
    }

    #[inline(always)]
    unsafe fn div(self, other: Self) -> Self {
        Neon(each!(vdivq_f32, self.0, other.0))
    }

    #[inline(always)]
    unsafe fn sqrt(self) -> Self {
        Neon(each!(vsqrtq_f32, self.0))
    }

    #[inline(always)]
    unsafe fn sign(self) -> Self {
        Neon(each!(sign, self.0))
    }

    #[inline(always)]
    unsafe fn quiet(self) -> Self {
        Neon(each!(quiet, self.0))
    }

    #[inline(always)]
    unsafe fn load_half(from: *const u16) -> Self::Half {
        [vld1_u16(from), vld1_u16(from.add(4)), vld1_u16(from.add(8)), vld1_u16(from.add(12))]
    }

    #[inline(always)]
    unsafe fn store_half(half: Self::Half, to: *mut u16) {
        vst1_u16(to, half[0]);
        vst1_u16(to.add(4), half[1]);
        vst1_u16(to.add(8), half[2]);
        vst1_u16(to.add(12), half[3]);
    }

    #[inline(always)]
    unsafe fn stream_half(half: Self::Half, to: *mut u16) {
        Self::store_half(half, to);
    }

    #[inline(always)]
    unsafe fn from_f16(half: Self::Half) -> Self {
        Neon(each!(widen_f16, half))
    }

    #[inline(always)]
    unsafe fn from_bf16(half: Self::Half) -> Self {
        Neon(each!(widen_bf16, half))
    }

    #[inline(always)]
    unsafe fn to_f16(self) -> Self::Half {
        each!(narrow_f16, self.0)
    }

    #[inline(always)]
    unsafe fn to_bf16(self) -> Self::Half {
        each!(narrow_bf16, self.0)
    }

    #[inline(always)]
    unsafe fn no_sums() -> Self::Sums {
        [vdupq_n_f64(0.0); 8]
    }

    #[inline(always)]
    unsafe fn add_squares(self, sums: Self::Sums) -> Self::Sums {
        [
            add_square(sums[0], vcvt_f64_f32(vget_low_f32(self.0[0]))),
            add_square(sums[1], vcvt_high_f64_f32(self.0[0])),
            add_square(sums[2], vcvt_f64_f32(vget_low_f32(self.0[1]))),
            add_square(sums[3], vcvt_high_f64_f32(self.0[1])),
            add_square(sums[4], vcvt_f64_f32(vget_low_f32(self.0[2]))),
            add_square(sums[5], vcvt_high_f64_f32(self.0[2])),
            add_square(sums[6], vcvt_f64_f32(vget_low_f32(self.0[3]))),
            add_square(sums[7], vcvt_high_f64_f32(self.0[3])),
        ]
    }

    #[inline(always)]
    unsafe fn spill(sums: Self::Sums) -> [f64; LANES] {
        let mut lanes = [0.0; LANES];
        for (pair, sum) in lanes.chunks_exact_mut(2).zip(sums) {
            vst1q_f64(pair.as_mut_ptr(), sum);
        }
        lanes
    }

    #[inline(always)]
    unsafe fn fence() {}
}

#[inline(always)]
unsafe fn quiet(x: float32x4_t) -> float32x4_t {
    // A NaN is not equal to itself.
    vbslq_f32(vceqq_f32(x, x), x, vdupq_n_f32(CANONICAL_NAN))
}

#[inline(always)]
unsafe fn sign(x: float32x4_t) -> float32x4_t {
    let zero = vdupq_n_f32(0.0);
    let sign = vbslq_f32(vcgtq_f32(x, zero), vdupq_n_f32(1.0), zero);
    let sign = vbslq_f32(vcltq_f32(x, zero), vdupq_n_f32(-1.0), sign);
    vbslq_f32(vceqq_f32(x, x), sign, x)
}

#[inline(always)]
unsafe fn widen_f16(half: uint16x4_t) -> float32x4_t {
    vcvt_f32_f16(vreinterpret_f16_u16(half))
}

#[inline(always)]
unsafe fn narrow_f16(x: float32x4_t) -> uint16x4_t {
    vreinterpret_u16_f16(vcvt_f16_f32(x))
}

#[inline(always)]
unsafe fn widen_bf16(half: uint16x4_t) -> float32x4_t {
    vreinterpretq_f32_u32(vshll_n_u16::<16>(half))
}

/// Integer rounding, as the reference does it.
#[inline(always)]
unsafe fn narrow_bf16(x: float32x4_t) -> uint16x4_t {
    let bits = vreinterpretq_u32_f32(x);
    let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
    vshrn_n_u32::<16>(vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7FFF)), odd))
}

#[inline(always)]
unsafe fn add_square(sum: float64x2_t, x: float64x2_t) -> float64x2_t {
    vaddq_f64(sum, vmulq_f64(x, x))
}
