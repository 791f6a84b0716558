//! Sixteen lanes are two AVX registers: elements 0 to 7 and 8 to 15. Half-precision conversion is F16C's.

#![allow(unsafe_code, unsafe_op_in_unsafe_fn)] // The contract of every function here is that of `Lanes`.

use std::arch::x86_64::*;

use super::super::low::InLoop;
use super::super::rules::Number;
use super::super::scalar::convert::CANONICAL_NAN;
use super::super::vector::{self, Lanes, entry_points};
use super::super::{
    Code, Gradient, ImageMut, Moment, Random, Scalars, State, StateLow, Statistics, isa::LANES,
};

entry_points!(Avx2, "avx2,fma,f16c");

#[derive(Clone, Copy)]
struct Avx2(__m256, __m256);

impl Number for Avx2 {
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Avx2(_mm256_set1_ps(x), _mm256_set1_ps(x))
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        Avx2(_mm256_add_ps(self.0, other.0), _mm256_add_ps(self.1, other.1))
    }

    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        Avx2(_mm256_sub_ps(self.0, other.0), _mm256_sub_ps(self.1, other.1))
    }

    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        Avx2(_mm256_mul_ps(self.0, other.0), _mm256_mul_ps(self.1, other.1))
    }

    #[inline(always)]
    unsafe fn div(self, other: Self) -> Self {
        Avx2(_mm256_div_ps(self.0, other.0), _mm256_div_ps(self.1, other.1))
    }

    #[inline(always)]
    unsafe fn sqrt(self) -> Self {
        Avx2(_mm256_sqrt_ps(self.0), _mm256_sqrt_ps(self.1))
    }

    #[inline(always)]
    unsafe fn sign(self) -> Self {
        Avx2(sign(self.0), sign(self.1))
    }
}

impl Lanes for Avx2 {
    type Half = __m256i;
    type Sums = [__m256d; 4];
    type Words = (__m256i, __m256i);

    const STREAM_ALIGNMENT: usize = 64;

    #[inline(always)]
    fn ahead() -> usize {
        super::ahead()
    }

    #[inline(always)]
    unsafe fn prefetch(at: *const u8) {
        _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        Avx2(_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8)))
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        _mm256_storeu_ps(to, self.0);
        _mm256_storeu_ps(to.add(8), self.1);
    }

    #[inline(always)]
    unsafe fn stream(self, to: *mut f32) {
        _mm256_stream_ps(to, self.0);
        _mm256_stream_ps(to.add(8), self.1);
    }

    #[inline(always)]
    unsafe fn quiet(self) -> Self {
        Avx2(quiet(self.0), quiet(self.1))
    }

    #[inline(always)]
    unsafe fn load_half(from: *const u16) -> __m256i {
        _mm256_loadu_si256(from.cast())
    }

    #[inline(always)]
    unsafe fn store_half(half: __m256i, to: *mut u16) {
        _mm256_storeu_si256(to.cast(), half);
    }

    #[inline(always)]
    unsafe fn stream_half(half: __m256i, to: *mut u16) {
        _mm256_stream_si256(to.cast(), half);
    }

    #[inline(always)]
    unsafe fn from_f16(half: __m256i) -> Self {
        Avx2(
            _mm256_cvtph_ps(_mm256_castsi256_si128(half)),
            _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(half)),
        )
    }

    #[inline(always)]
    unsafe fn from_bf16(half: __m256i) -> Self {
        let low = _mm256_cvtepu16_epi32(_mm256_castsi256_si128(half));
        let high = _mm256_cvtepu16_epi32(_mm256_extracti128_si256::<1>(half));
        Avx2(
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
        )
    }

    #[inline(always)]
    unsafe fn to_f16(self) -> __m256i {
        let low = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0);
        let high = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.1);
        _mm256_set_m128i(high, low)
    }

    #[inline(always)]
    unsafe fn to_bf16(self) -> __m256i {
        // Packing works within 128-bit lanes, so the quarters come out in the order 0 2 1 3.
        let packed = _mm256_packus_epi32(round_to_bf16(self.0), round_to_bf16(self.1));
        _mm256_permute4x64_epi64::<0b11_01_10_00>(packed)
    }

    #[inline(always)]
    unsafe fn min(self, other: Self) -> Self {
        Avx2(_mm256_min_ps(self.0, other.0), _mm256_min_ps(self.1, other.1))
    }

    #[inline(always)]
    unsafe fn lookup(self, index: Self::Words) -> Self {
        Avx2(lookup(self, index.0), lookup(self, index.1))
    }

    #[inline(always)]
    unsafe fn to_words(self) -> Self::Words {
        (_mm256_castps_si256(self.0), _mm256_castps_si256(self.1))
    }

    #[inline(always)]
    unsafe fn from_words(words: Self::Words) -> Self {
        Avx2(_mm256_castsi256_ps(words.0), _mm256_castsi256_ps(words.1))
    }

    #[inline(always)]
    unsafe fn convert(words: Self::Words) -> Self {
        Avx2(_mm256_cvtepi32_ps(words.0), _mm256_cvtepi32_ps(words.1))
    }

    #[inline(always)]
    unsafe fn truncate(self) -> Self::Words {
        (_mm256_cvttps_epi32(self.0), _mm256_cvttps_epi32(self.1))
    }

    #[inline(always)]
    unsafe fn splat_words(x: u32) -> Self::Words {
        (_mm256_set1_epi32(x as i32), _mm256_set1_epi32(x as i32))
    }

    #[inline(always)]
    unsafe fn load_words(from: *const u32) -> Self::Words {
        (_mm256_loadu_si256(from.cast()), _mm256_loadu_si256(from.add(8).cast()))
    }

    #[inline(always)]
    unsafe fn store_words(words: Self::Words, to: *mut u32) {
        _mm256_storeu_si256(to.cast(), words.0);
        _mm256_storeu_si256(to.add(8).cast(), words.1);
    }

    #[inline(always)]
    unsafe fn load_unsigned_bytes(from: *const u8) -> Self::Words {
        let bytes = _mm_loadu_si128(from.cast());
        (_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128::<8>(bytes)))
    }

    #[inline(always)]
    unsafe fn load_signed_bytes(from: *const u8) -> Self::Words {
        let bytes = _mm_loadu_si128(from.cast());
        (_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128::<8>(bytes)))
    }

    #[inline(always)]
    unsafe fn store_bytes<const SIGNED: bool>([a, b, c, d]: [Self::Words; 4], to: *mut u8) {
        _mm256_storeu_si256(to.cast(), pack_bytes::<SIGNED>([a.0, a.1, b.0, b.1]));
        _mm256_storeu_si256(to.add(32).cast(), pack_bytes::<SIGNED>([c.0, c.1, d.0, d.1]));
    }

    #[inline(always)]
    unsafe fn upper_half(words: Self::Words) -> __m256i {
        pack_upper(words.0, words.1)
    }

    #[inline(always)]
    unsafe fn add_words(a: Self::Words, b: Self::Words) -> Self::Words {
        (_mm256_add_epi32(a.0, b.0), _mm256_add_epi32(a.1, b.1))
    }

    #[inline(always)]
    unsafe fn mul_words(a: Self::Words, b: Self::Words) -> Self::Words {
        (_mm256_mullo_epi32(a.0, b.0), _mm256_mullo_epi32(a.1, b.1))
    }

    #[inline(always)]
    unsafe fn and_words(a: Self::Words, b: Self::Words) -> Self::Words {
        (_mm256_and_si256(a.0, b.0), _mm256_and_si256(a.1, b.1))
    }

    #[inline(always)]
    unsafe fn or_words(a: Self::Words, b: Self::Words) -> Self::Words {
        (_mm256_or_si256(a.0, b.0), _mm256_or_si256(a.1, b.1))
    }

    #[inline(always)]
    unsafe fn xor_words(a: Self::Words, b: Self::Words) -> Self::Words {
        (_mm256_xor_si256(a.0, b.0), _mm256_xor_si256(a.1, b.1))
    }

    #[inline(always)]
    unsafe fn max_words(a: Self::Words, b: Self::Words) -> Self::Words {
        (_mm256_max_epi32(a.0, b.0), _mm256_max_epi32(a.1, b.1))
    }

    #[inline(always)]
    unsafe fn min_words(a: Self::Words, b: Self::Words) -> Self::Words {
        (_mm256_min_epi32(a.0, b.0), _mm256_min_epi32(a.1, b.1))
    }

    #[inline(always)]
    unsafe fn shift_left<const BITS: u32>(words: Self::Words) -> Self::Words {
        let bits = _mm_cvtsi32_si128(BITS as i32);
        (_mm256_sll_epi32(words.0, bits), _mm256_sll_epi32(words.1, bits))
    }

    #[inline(always)]
    unsafe fn shift_right<const BITS: u32>(words: Self::Words) -> Self::Words {
        let bits = _mm_cvtsi32_si128(BITS as i32);
        (_mm256_srl_epi32(words.0, bits), _mm256_srl_epi32(words.1, bits))
    }

    #[inline(always)]
    unsafe fn sign_mask(words: Self::Words) -> Self::Words {
        (_mm256_srai_epi32::<31>(words.0), _mm256_srai_epi32::<31>(words.1))
    }

    #[inline(always)]
    unsafe fn no_sums() -> Self::Sums {
        [_mm256_setzero_pd(); 4]
    }

    #[inline(always)]
    unsafe fn add_square(self, to: Self) -> Self {
        Avx2(_mm256_fmadd_ps(self.0, self.0, to.0), _mm256_fmadd_ps(self.1, self.1, to.1))
    }

    #[inline(always)]
    unsafe fn add_to(self, [a, b, c, d]: Self::Sums) -> Self::Sums {
        let [x, y, z, w] = self.widened();
        [_mm256_add_pd(a, x), _mm256_add_pd(b, y), _mm256_add_pd(c, z), _mm256_add_pd(d, w)]
    }

    #[inline(always)]
    unsafe fn add_exact_square(self, [a, b, c, d]: Self::Sums) -> Self::Sums {
        let [x, y, z, w] = self.widened();
        [
            _mm256_fmadd_pd(x, x, a),
            _mm256_fmadd_pd(y, y, b),
            _mm256_fmadd_pd(z, z, c),
            _mm256_fmadd_pd(w, w, d),
        ]
    }

    #[inline(always)]
    unsafe fn spill(sums: Self::Sums) -> [f64; LANES] {
        let mut lanes = [0.0; LANES];
        _mm256_storeu_pd(lanes.as_mut_ptr(), sums[0]);
        _mm256_storeu_pd(lanes.as_mut_ptr().add(4), sums[1]);
        _mm256_storeu_pd(lanes.as_mut_ptr().add(8), sums[2]);
        _mm256_storeu_pd(lanes.as_mut_ptr().add(12), sums[3]);
        lanes
    }

    #[inline(always)]
    unsafe fn fence() {
        _mm_sfence();
    }
}

impl Avx2 {
    #[inline(always)]
    unsafe fn widened(self) -> [__m256d; 4] {
        [
            _mm256_cvtps_pd(_mm256_castps256_ps128(self.0)),
            _mm256_cvtps_pd(_mm256_extractf128_ps::<1>(self.0)),
            _mm256_cvtps_pd(_mm256_castps256_ps128(self.1)),
            _mm256_cvtps_pd(_mm256_extractf128_ps::<1>(self.1)),
        ]
    }
}

#[inline(always)]
unsafe fn quiet(x: __m256) -> __m256 {
    _mm256_blendv_ps(x, _mm256_set1_ps(CANONICAL_NAN), _mm256_cmp_ps::<_CMP_UNORD_Q>(x, x))
}

#[inline(always)]
unsafe fn sign(x: __m256) -> __m256 {
    let zero = _mm256_setzero_ps();
    let positive = _mm256_and_ps(_mm256_cmp_ps::<_CMP_GT_OQ>(x, zero), _mm256_set1_ps(1.0));
    let negative = _mm256_and_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(x, zero), _mm256_set1_ps(-1.0));
    _mm256_blendv_ps(_mm256_or_ps(positive, negative), x, _mm256_cmp_ps::<_CMP_UNORD_Q>(x, x))
}

/// Returns bf16 in the lower half of every 32 bits. Integer arithmetic rounds it, as in the reference.
#[inline(always)]
unsafe fn round_to_bf16(x: __m256) -> __m256i {
    let bits = _mm256_castps_si256(x);
    let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
    let rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
    _mm256_srli_epi32::<16>(rounded)
}

/// The upper halves of 16 words.
#[inline(always)]
unsafe fn pack_upper(low: __m256i, high: __m256i) -> __m256i {
    // Packing works within 128-bit lanes, so the quarters come out in the order 0 2 1 3.
    let packed = _mm256_packus_epi32(_mm256_srli_epi32::<16>(low), _mm256_srli_epi32::<16>(high));
    _mm256_permute4x64_epi64::<0b11_01_10_00>(packed)
}

/// Permutations take three bits of an index. So both halves of the table are looked up, and the fourth bit, moved to
/// the sign, chooses.
#[inline(always)]
unsafe fn lookup(table: Avx2, index: __m256i) -> __m256 {
    let (low, high) = (_mm256_permutevar8x32_ps(table.0, index), _mm256_permutevar8x32_ps(table.1, index));
    _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32::<28>(index)))
}

/// Packs thirty-two words into bytes.
#[inline(always)]
unsafe fn pack_bytes<const SIGNED: bool>([a, b, c, d]: [__m256i; 4]) -> __m256i {
    // Packing works within 128-bit lanes, so half `l` of all four vectors comes out in lane `l`.
    let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    let (low, high) = (_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
    let bytes = if SIGNED { _mm256_packs_epi16(low, high) } else { _mm256_packus_epi16(low, high) };
    _mm256_permutevar8x32_epi32(bytes, order)
}
