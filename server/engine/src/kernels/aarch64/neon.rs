//! Sixteen lanes are four NEON registers. Advanced SIMD on AArch64 is IEEE-754 throughout: denormals, division and
//! square root too.

#![allow(unsafe_code, unsafe_op_in_unsafe_fn)] // The contract of every function here is that of `Lanes`.

use std::arch::aarch64::*;

use super::super::low::InLoop;
use super::super::rules::Number;
use super::super::scalar::convert::CANONICAL_NAN;
use super::super::vector::{self, Lanes, entry_points};
use super::super::{
    Code, Gradient, ImageMut, Moment, Random, Scalars, State, StateLow, Statistics, isa::LANES,
};

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

impl Number for Neon {
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Neon([vdupq_n_f32(x); 4])
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
}

impl Lanes for Neon {
    type Half = [uint16x4_t; 4];
    type Sums = [float64x2_t; 8];
    type Words = [uint32x4_t; 4];

    /// The cores at hand ignore the hint of non-temporal pairs (STNP), so stores are ordinary.
    const STREAM_ALIGNMENT: usize = 1;

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
    unsafe fn min(self, other: Self) -> Self {
        Neon(each!(vminq_f32, self.0, other.0))
    }

    #[inline(always)]
    unsafe fn lookup(self, index: Self::Words) -> Self {
        let table = bytes_of(self);
        Neon([
            lookup(table, index[0]),
            lookup(table, index[1]),
            lookup(table, index[2]),
            lookup(table, index[3]),
        ])
    }

    #[inline(always)]
    unsafe fn to_words(self) -> Self::Words {
        each!(vreinterpretq_u32_f32, self.0)
    }

    #[inline(always)]
    unsafe fn from_words(words: Self::Words) -> Self {
        Neon(each!(vreinterpretq_f32_u32, words))
    }

    #[inline(always)]
    unsafe fn convert(words: Self::Words) -> Self {
        Neon(each!(convert, words))
    }

    #[inline(always)]
    unsafe fn truncate(self) -> Self::Words {
        each!(truncate, self.0)
    }

    #[inline(always)]
    unsafe fn splat_words(x: u32) -> Self::Words {
        [vdupq_n_u32(x); 4]
    }

    #[inline(always)]
    unsafe fn load_words(from: *const u32) -> Self::Words {
        [vld1q_u32(from), vld1q_u32(from.add(4)), vld1q_u32(from.add(8)), vld1q_u32(from.add(12))]
    }

    #[inline(always)]
    unsafe fn store_words(words: Self::Words, to: *mut u32) {
        vst1q_u32(to, words[0]);
        vst1q_u32(to.add(4), words[1]);
        vst1q_u32(to.add(8), words[2]);
        vst1q_u32(to.add(12), words[3]);
    }

    #[inline(always)]
    unsafe fn load_unsigned_bytes(from: *const u8) -> Self::Words {
        let bytes = vld1q_u8(from);
        let (low, high) = (vmovl_u8(vget_low_u8(bytes)), vmovl_high_u8(bytes));
        [
            vmovl_u16(vget_low_u16(low)),
            vmovl_high_u16(low),
            vmovl_u16(vget_low_u16(high)),
            vmovl_high_u16(high),
        ]
    }

    #[inline(always)]
    unsafe fn load_signed_bytes(from: *const u8) -> Self::Words {
        let bytes = vreinterpretq_s8_u8(vld1q_u8(from));
        let (low, high) = (vmovl_s8(vget_low_s8(bytes)), vmovl_high_s8(bytes));
        [
            vreinterpretq_u32_s32(vmovl_s16(vget_low_s16(low))),
            vreinterpretq_u32_s32(vmovl_high_s16(low)),
            vreinterpretq_u32_s32(vmovl_s16(vget_low_s16(high))),
            vreinterpretq_u32_s32(vmovl_high_s16(high)),
        ]
    }

    #[inline(always)]
    unsafe fn store_bytes<const SIGNED: bool>(words: [Self::Words; 4], to: *mut u8) {
        for (i, words) in words.into_iter().enumerate() {
            let words = each!(vreinterpretq_s32_u32, words);
            let low = vcombine_s16(vqmovn_s32(words[0]), vqmovn_s32(words[1]));
            let high = vcombine_s16(vqmovn_s32(words[2]), vqmovn_s32(words[3]));
            let bytes = if SIGNED {
                vreinterpretq_u8_s8(vcombine_s8(vqmovn_s16(low), vqmovn_s16(high)))
            } else {
                vcombine_u8(vqmovun_s16(low), vqmovun_s16(high))
            };
            vst1q_u8(to.add(LANES * i), bytes);
        }
    }

    #[inline(always)]
    unsafe fn upper_half(words: Self::Words) -> Self::Half {
        each!(upper_half, words)
    }

    #[inline(always)]
    unsafe fn add_words(a: Self::Words, b: Self::Words) -> Self::Words {
        each!(vaddq_u32, a, b)
    }

    #[inline(always)]
    unsafe fn mul_words(a: Self::Words, b: Self::Words) -> Self::Words {
        each!(vmulq_u32, a, b)
    }

    #[inline(always)]
    unsafe fn and_words(a: Self::Words, b: Self::Words) -> Self::Words {
        each!(vandq_u32, a, b)
    }

    #[inline(always)]
    unsafe fn or_words(a: Self::Words, b: Self::Words) -> Self::Words {
        each!(vorrq_u32, a, b)
    }

    #[inline(always)]
    unsafe fn xor_words(a: Self::Words, b: Self::Words) -> Self::Words {
        each!(veorq_u32, a, b)
    }

    #[inline(always)]
    unsafe fn max_words(a: Self::Words, b: Self::Words) -> Self::Words {
        each!(max, a, b)
    }

    #[inline(always)]
    unsafe fn min_words(a: Self::Words, b: Self::Words) -> Self::Words {
        each!(min, a, b)
    }

    #[inline(always)]
    unsafe fn shift_left<const BITS: u32>(words: Self::Words) -> Self::Words {
        let bits = vdupq_n_s32(BITS as i32);
        each!(vshlq_u32, words, [bits; 4])
    }

    #[inline(always)]
    unsafe fn shift_right<const BITS: u32>(words: Self::Words) -> Self::Words {
        let bits = vdupq_n_s32(-(BITS as i32));
        each!(vshlq_u32, words, [bits; 4])
    }

    #[inline(always)]
    unsafe fn sign_mask(words: Self::Words) -> Self::Words {
        each!(sign_mask, words)
    }

    #[inline(always)]
    unsafe fn no_sums() -> Self::Sums {
        [vdupq_n_f64(0.0); 8]
    }

    #[inline(always)]
    unsafe fn add_square(self, to: Self) -> Self {
        let [a, b, c, d] = self.0;
        let [e, f, g, h] = to.0;
        Neon([vfmaq_f32(e, a, a), vfmaq_f32(f, b, b), vfmaq_f32(g, c, c), vfmaq_f32(h, d, d)])
    }

    #[inline(always)]
    unsafe fn add_to(self, mut sums: Self::Sums) -> Self::Sums {
        for (pair, &four) in sums.as_chunks_mut::<2>().0.iter_mut().zip(&self.0) {
            pair[0] = vaddq_f64(pair[0], vcvt_f64_f32(vget_low_f32(four)));
            pair[1] = vaddq_f64(pair[1], vcvt_high_f64_f32(four));
        }
        sums
    }

    #[inline(always)]
    unsafe fn add_exact_square(self, mut sums: Self::Sums) -> Self::Sums {
        for (pair, &four) in sums.as_chunks_mut::<2>().0.iter_mut().zip(&self.0) {
            let (low, high) = (vcvt_f64_f32(vget_low_f32(four)), vcvt_high_f64_f32(four));
            pair[0] = vfmaq_f64(pair[0], low, low);
            pair[1] = vfmaq_f64(pair[1], high, high);
        }
        sums
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

/// Rounds by integer arithmetic, as the reference does.
#[inline(always)]
unsafe fn narrow_bf16(x: float32x4_t) -> uint16x4_t {
    let bits = vreinterpretq_u32_f32(x);
    let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
    vshrn_n_u32::<16>(vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7FFF)), odd))
}

#[inline(always)]
unsafe fn convert(words: uint32x4_t) -> float32x4_t {
    vcvtq_f32_s32(vreinterpretq_s32_u32(words))
}

#[inline(always)]
unsafe fn truncate(x: float32x4_t) -> uint32x4_t {
    vreinterpretq_u32_s32(vcvtq_s32_f32(x))
}

#[inline(always)]
unsafe fn upper_half(words: uint32x4_t) -> uint16x4_t {
    vshrn_n_u32::<16>(words)
}

#[inline(always)]
unsafe fn max(a: uint32x4_t, b: uint32x4_t) -> uint32x4_t {
    vreinterpretq_u32_s32(vmaxq_s32(vreinterpretq_s32_u32(a), vreinterpretq_s32_u32(b)))
}

#[inline(always)]
unsafe fn min(a: uint32x4_t, b: uint32x4_t) -> uint32x4_t {
    vreinterpretq_u32_s32(vminq_s32(vreinterpretq_s32_u32(a), vreinterpretq_s32_u32(b)))
}

#[inline(always)]
unsafe fn sign_mask(words: uint32x4_t) -> uint32x4_t {
    vreinterpretq_u32_s32(vshrq_n_s32::<31>(vreinterpretq_s32_u32(words)))
}

#[inline(always)]
unsafe fn bytes_of(table: Neon) -> uint8x16x4_t {
    let bytes = each!(vreinterpretq_u8_f32, table.0);
    uint8x16x4_t(bytes[0], bytes[1], bytes[2], bytes[3])
}

/// Looks up sixteen lanes. The instruction looks up bytes, so each index becomes the positions of its four bytes.
#[inline(always)]
unsafe fn lookup(table: uint8x16x4_t, index: uint32x4_t) -> float32x4_t {
    let index = vandq_u32(index, vdupq_n_u32(15));
    let places = vmlaq_u32(vdupq_n_u32(0x0302_0100), index, vdupq_n_u32(0x0404_0404));
    vreinterpretq_f32_u8(vqtbl4q_u8(table, vreinterpretq_u8_u32(places)))
}
