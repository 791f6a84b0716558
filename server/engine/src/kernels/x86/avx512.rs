//! Sixteen lanes are one AVX-512 register. Half-precision conversion is AVX-512F's own.

#![allow(unsafe_code, unsafe_op_in_unsafe_fn)] // The contract of every function here is that of `Lanes`.

use std::arch::x86_64::*;

use super::super::low::InLoop;
use super::super::rules::Number;
use super::super::scalar::convert::CANONICAL_NAN;
use super::super::vector::{self, Lanes, entry_points};
use super::super::{
    Code, Gradient, ImageMut, Moment, Random, Scalars, State, StateLow, Statistics, isa::LANES,
};

entry_points!(Avx512, "avx512f,avx512bw,avx512vl,avx512dq,avx2,f16c");

#[derive(Clone, Copy)]
struct Avx512(__m512);

impl Number for Avx512 {
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Avx512(_mm512_set1_ps(x))
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        Avx512(_mm512_add_ps(self.0, other.0))
    }

    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        Avx512(_mm512_sub_ps(self.0, other.0))
    }

    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        Avx512(_mm512_mul_ps(self.0, other.0))
    }

    #[inline(always)]
    unsafe fn div(self, other: Self) -> Self {
        Avx512(_mm512_div_ps(self.0, other.0))
    }

    #[inline(always)]
    unsafe fn sqrt(self) -> Self {
        Avx512(_mm512_sqrt_ps(self.0))
    }

    #[inline(always)]
    unsafe fn sign(self) -> Self {
        let zero = _mm512_setzero_ps();
        let positive = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(self.0, zero);
        let negative = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(self.0, zero);
        let unordered = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(self.0, self.0);
        let sign = _mm512_maskz_mov_ps(positive, _mm512_set1_ps(1.0));
        let sign = _mm512_mask_mov_ps(sign, negative, _mm512_set1_ps(-1.0));
        Avx512(_mm512_mask_mov_ps(sign, unordered, self.0))
    }
}

impl Lanes for Avx512 {
    type Half = __m256i;
    type Sums = [__m512d; 2];
    type Words = __m512i;

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
        Avx512(_mm512_loadu_ps(from))
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        _mm512_storeu_ps(to, self.0);
    }

    #[inline(always)]
    unsafe fn stream(self, to: *mut f32) {
        _mm512_stream_ps(to, self.0);
    }

    #[inline(always)]
    unsafe fn quiet(self) -> Self {
        let unordered = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(self.0, self.0);
        Avx512(_mm512_mask_mov_ps(self.0, unordered, _mm512_set1_ps(CANONICAL_NAN)))
    }

    /// Two comparisons find NaN in three vectors, since one comparison tests two vectors. Most vectors have no NaN.
    #[inline(always)]
    unsafe fn quiet_all([a, b, c]: [Self; 3]) -> [Self; 3] {
        let unordered =
            _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(a.0, b.0) | _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(c.0, c.0);
        if unordered == 0 {
            return [a, b, c];
        }
        cold();
        [a.quiet(), b.quiet(), c.quiet()]
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
        Avx512(_mm512_cvtph_ps(half))
    }

    #[inline(always)]
    unsafe fn from_bf16(half: __m256i) -> Self {
        Avx512(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(half))))
    }

    #[inline(always)]
    unsafe fn to_f16(self) -> __m256i {
        _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.0)
    }

    /// Rounds by integer arithmetic, since `vcvtneps2bf16` would flush denormals.
    #[inline(always)]
    unsafe fn to_bf16(self) -> __m256i {
        let bits = _mm512_castps_si512(self.0);
        let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        let rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
        upper_half(rounded)
    }

    #[inline(always)]
    unsafe fn min(self, other: Self) -> Self {
        Avx512(_mm512_min_ps(self.0, other.0))
    }

    #[inline(always)]
    unsafe fn lookup(self, index: __m512i) -> Self {
        Avx512(_mm512_permutexvar_ps(index, self.0))
    }

    #[inline(always)]
    unsafe fn to_words(self) -> __m512i {
        _mm512_castps_si512(self.0)
    }

    #[inline(always)]
    unsafe fn from_words(words: __m512i) -> Self {
        Avx512(_mm512_castsi512_ps(words))
    }

    #[inline(always)]
    unsafe fn convert(words: __m512i) -> Self {
        Avx512(_mm512_cvtepi32_ps(words))
    }

    #[inline(always)]
    unsafe fn truncate(self) -> __m512i {
        _mm512_cvttps_epi32(self.0)
    }

    #[inline(always)]
    unsafe fn splat_words(x: u32) -> __m512i {
        _mm512_set1_epi32(x as i32)
    }

    #[inline(always)]
    unsafe fn load_words(from: *const u32) -> __m512i {
        _mm512_loadu_si512(from.cast())
    }

    #[inline(always)]
    unsafe fn store_words(words: __m512i, to: *mut u32) {
        _mm512_storeu_si512(to.cast(), words);
    }

    #[inline(always)]
    unsafe fn load_unsigned_bytes(from: *const u8) -> __m512i {
        _mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast()))
    }

    #[inline(always)]
    unsafe fn load_signed_bytes(from: *const u8) -> __m512i {
        _mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast()))
    }

    #[inline(always)]
    unsafe fn store_bytes<const SIGNED: bool>([a, b, c, d]: [__m512i; 4], to: *mut u8) {
        // Packing works within 128-bit lanes, so quarter `l` of all four vectors comes out in lane `l`. (`vpmovdb` to
        // memory would pack one at a time. On Zen 5 it took a fifth of all time of 8-bit AdamW.)
        let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        let (low, high) = (_mm512_packs_epi32(a, b), _mm512_packs_epi32(c, d));
        let bytes = if SIGNED { _mm512_packs_epi16(low, high) } else { _mm512_packus_epi16(low, high) };
        _mm512_storeu_si512(to.cast(), _mm512_permutexvar_epi32(order, bytes));
    }

    #[inline(always)]
    unsafe fn upper_half(words: __m512i) -> __m256i {
        upper_half(words)
    }

    #[inline(always)]
    unsafe fn add_words(a: __m512i, b: __m512i) -> __m512i {
        _mm512_add_epi32(a, b)
    }

    #[inline(always)]
    unsafe fn mul_words(a: __m512i, b: __m512i) -> __m512i {
        _mm512_mullo_epi32(a, b)
    }

    #[inline(always)]
    unsafe fn and_words(a: __m512i, b: __m512i) -> __m512i {
        _mm512_and_si512(a, b)
    }

    #[inline(always)]
    unsafe fn or_words(a: __m512i, b: __m512i) -> __m512i {
        _mm512_or_si512(a, b)
    }

    #[inline(always)]
    unsafe fn xor_words(a: __m512i, b: __m512i) -> __m512i {
        _mm512_xor_si512(a, b)
    }

    #[inline(always)]
    unsafe fn max_words(a: __m512i, b: __m512i) -> __m512i {
        _mm512_max_epi32(a, b)
    }

    #[inline(always)]
    unsafe fn min_words(a: __m512i, b: __m512i) -> __m512i {
        _mm512_min_epi32(a, b)
    }

    #[inline(always)]
    unsafe fn shift_left<const BITS: u32>(words: __m512i) -> __m512i {
        _mm512_slli_epi32::<BITS>(words)
    }

    #[inline(always)]
    unsafe fn shift_right<const BITS: u32>(words: __m512i) -> __m512i {
        _mm512_srli_epi32::<BITS>(words)
    }

    #[inline(always)]
    unsafe fn sign_mask(words: __m512i) -> __m512i {
        _mm512_srai_epi32::<31>(words)
    }

    #[inline(always)]
    unsafe fn no_sums() -> Self::Sums {
        [_mm512_setzero_pd(); 2]
    }

    #[inline(always)]
    unsafe fn add_square(self, to: Self) -> Self {
        Avx512(_mm512_fmadd_ps(self.0, self.0, to.0))
    }

    #[inline(always)]
    unsafe fn add_to(self, [low, high]: Self::Sums) -> Self::Sums {
        let [x, y] = widened(self.0);
        [_mm512_add_pd(low, x), _mm512_add_pd(high, y)]
    }

    #[inline(always)]
    unsafe fn add_exact_square(self, [low, high]: Self::Sums) -> Self::Sums {
        let [x, y] = widened(self.0);
        [_mm512_fmadd_pd(x, x, low), _mm512_fmadd_pd(y, y, high)]
    }

    #[inline(always)]
    unsafe fn spill([low, high]: Self::Sums) -> [f64; LANES] {
        let mut lanes = [0.0; LANES];
        _mm512_storeu_pd(lanes.as_mut_ptr(), low);
        _mm512_storeu_pd(lanes.as_mut_ptr().add(8), high);
        lanes
    }

    #[inline(always)]
    unsafe fn fence() {
        _mm_sfence();
    }
}

/// Called in a branch, so that the compiler does not make a selection of it.
#[cold]
#[inline(always)]
fn cold() {}

#[inline(always)]
unsafe fn widened(x: __m512) -> [__m512d; 2] {
    [_mm512_cvtps_pd(_mm512_castps512_ps256(x)), _mm512_cvtps_pd(_mm512_extractf32x8_ps::<1>(x))]
}

/// Takes one permutation of 16-bit elements; shifting and narrowing would be three operations.
#[inline(always)]
unsafe fn upper_half(words: __m512i) -> __m256i {
    const ODD: [u16; 32] = [
        1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23,
        25, 27, 29, 31,
    ];
    let odd = _mm512_loadu_si512(ODD.as_ptr().cast());
    _mm512_castsi512_si256(_mm512_permutexvar_epi16(odd, words))
}
