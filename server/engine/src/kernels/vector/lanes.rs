//! Interface of an instruction set: 16 lanes of f32 and the few operations of the loops.

use super::super::isa::LANES;
use super::super::rules::Number;
use super::super::scalar::convert::{Bf16, F16, F32, Format, Nothing};

/// Sixteen f32 lanes. Each method acts in every lane as the scalar reference does on one element, bit for
/// bit. A NaN may be any NaN until [`quiet`](Lanes::quiet).
///
/// Methods, and all generic loops over them, are `#[inline(always)]` without `#[target_feature]`: they must be inlined
/// into the one function per kernel that has the feature (see `entry_points!`). Elsewhere every intrinsic would be a
/// call.
///
/// # Safety
/// For all methods: this CPU has the instruction set of the implementing type. Pointers are valid for 16
/// elements, with no alignment beyond the element's own unless the method says so.
pub(in super::super) trait Lanes: Number {
    /// Sixteen 16-bit patterns.
    type Half: Copy;
    /// Sixteen f64 lanes.
    type Sums: Copy;
    /// Sixteen 32-bit integers.
    type Words: Copy;

    /// The alignment, in bytes, at which streaming stores must begin; 1 if they are ordinary stores.
    const STREAM_ALIGNMENT: usize;

    /// Prefetch distance of an update in elements; 0 where the CPU prefetches well by itself.
    #[inline(always)]
    fn ahead() -> usize {
        0
    }
    /// Asks for the cache line at an address, which need not be valid.
    #[inline(always)]
    unsafe fn prefetch(_: *const u8) {}

    unsafe fn load(from: *const f32) -> Self;
    unsafe fn store(self, to: *mut f32);
    /// A store to memory that is not read soon; `to` is aligned to [`STREAM_ALIGNMENT`](Lanes::STREAM_ALIGNMENT).
    unsafe fn stream(self, to: *mut f32);

    /// Any NaN becomes the canonical one.
    unsafe fn quiet(self) -> Self;
    /// Makes each vector [quiet](Lanes::quiet).
    #[inline(always)]
    unsafe fn quiet_all([a, b, c]: [Self; 3]) -> [Self; 3] {
        [a.quiet(), b.quiet(), c.quiet()]
    }

    unsafe fn load_half(from: *const u16) -> Self::Half;
    unsafe fn store_half(half: Self::Half, to: *mut u16);
    /// Stores as [`stream`](Lanes::stream) does, at any multiple of 16 elements from an aligned address.
    unsafe fn stream_half(half: Self::Half, to: *mut u16);
    unsafe fn from_f16(half: Self::Half) -> Self;
    unsafe fn from_bf16(half: Self::Half) -> Self;
    /// The lanes must have gone through [`quiet`](Lanes::quiet).
    unsafe fn to_f16(self) -> Self::Half;
    /// The lanes must have gone through [`quiet`](Lanes::quiet).
    unsafe fn to_bf16(self) -> Self::Half;

    /// If a lane of `other` is NaN, so is the result's.
    unsafe fn min(self, other: Self) -> Self;
    /// Lane `index % 16` of `self` for each of the indices.
    unsafe fn lookup(self, index: Self::Words) -> Self;
    unsafe fn to_words(self) -> Self::Words;
    unsafe fn from_words(words: Self::Words) -> Self;
    /// Converts signed integers to their values.
    unsafe fn convert(words: Self::Words) -> Self;
    /// Rounds toward zero, in the range of i32.
    unsafe fn truncate(self) -> Self::Words;

    unsafe fn splat_words(x: u32) -> Self::Words;
    unsafe fn load_words(from: *const u32) -> Self::Words;
    unsafe fn store_words(words: Self::Words, to: *mut u32);
    unsafe fn load_unsigned_bytes(from: *const u8) -> Self::Words;
    unsafe fn load_signed_bytes(from: *const u8) -> Self::Words;
    /// Stores sixty-four words as bytes, signed or not. A word out of range becomes the nearest byte.
    unsafe fn store_bytes<const SIGNED: bool>(words: [Self::Words; 4], to: *mut u8);
    /// The upper half of each word.
    unsafe fn upper_half(words: Self::Words) -> Self::Half;
    unsafe fn add_words(a: Self::Words, b: Self::Words) -> Self::Words;
    /// The lower 32 bits of each product.
    unsafe fn mul_words(a: Self::Words, b: Self::Words) -> Self::Words;
    unsafe fn and_words(a: Self::Words, b: Self::Words) -> Self::Words;
    unsafe fn or_words(a: Self::Words, b: Self::Words) -> Self::Words;
    unsafe fn xor_words(a: Self::Words, b: Self::Words) -> Self::Words;
    /// The larger of two words as signed integers.
    unsafe fn max_words(a: Self::Words, b: Self::Words) -> Self::Words;
    /// The smaller of two words as signed integers.
    unsafe fn min_words(a: Self::Words, b: Self::Words) -> Self::Words;
    unsafe fn shift_left<const BITS: u32>(words: Self::Words) -> Self::Words;
    unsafe fn shift_right<const BITS: u32>(words: Self::Words) -> Self::Words;
    /// All ones where the sign bit is set, else 0.
    unsafe fn sign_mask(words: Self::Words) -> Self::Words;

    unsafe fn no_sums() -> Self::Sums;
    /// Each lane's square added to the same lane of `to`, rounded once.
    unsafe fn add_square(self, to: Self) -> Self;
    /// Each lane added to the same lane of `sums`.
    unsafe fn add_to(self, sums: Self::Sums) -> Self::Sums;
    /// Adds each lane's square to the same lane of `sums`. Squares are exact in f64, so the addition may be
    /// fused or not.
    unsafe fn add_exact_square(self, sums: Self::Sums) -> Self::Sums;
    unsafe fn spill(sums: Self::Sums) -> [f64; LANES];

    /// Orders streaming stores before all later messages to other threads.
    unsafe fn fence();
}

/// An element format, 16 elements at a time. Its methods are safe under the conditions of [`Lanes`].
pub(super) trait LanesFormat: Format {
    /// True if [`load_two`](LanesFormat::load_two) returns first the elements of even index, then the odd
    /// ones.
    const INTERLEAVED: bool = false;

    unsafe fn load<V: Lanes>(from: *const Self::Bits) -> V;
    /// The next 32 elements.
    #[inline(always)]
    unsafe fn load_two<V: Lanes>(from: *const Self::Bits) -> [V; 2] {
        [Self::load(from), Self::load(from.add(LANES))]
    }
    unsafe fn store<V: Lanes>(lanes: V, to: *mut Self::Bits);
    unsafe fn stream<V: Lanes>(lanes: V, to: *mut Self::Bits);
}

impl LanesFormat for F32 {
    #[inline(always)]
    unsafe fn load<V: Lanes>(from: *const f32) -> V {
        V::load(from)
    }

    #[inline(always)]
    unsafe fn store<V: Lanes>(lanes: V, to: *mut f32) {
        lanes.store(to);
    }

    #[inline(always)]
    unsafe fn stream<V: Lanes>(lanes: V, to: *mut f32) {
        lanes.stream(to);
    }
}

impl LanesFormat for F16 {
    #[inline(always)]
    unsafe fn load<V: Lanes>(from: *const u16) -> V {
        V::from_f16(V::load_half(from))
    }

    #[inline(always)]
    unsafe fn store<V: Lanes>(lanes: V, to: *mut u16) {
        V::store_half(lanes.to_f16(), to);
    }

    #[inline(always)]
    unsafe fn stream<V: Lanes>(lanes: V, to: *mut u16) {
        V::stream_half(lanes.to_f16(), to);
    }
}

impl LanesFormat for Bf16 {
    const INTERLEAVED: bool = true;

    /// Loads the elements of even and of odd index apart, by one operation each. In order they would take two each.
    #[inline(always)]
    unsafe fn load_two<V: Lanes>(from: *const u16) -> [V; 2] {
        let pairs = V::load_words(from.cast());
        let even = V::shift_left::<16>(pairs);
        let odd = V::and_words(pairs, V::splat_words(0xFFFF_0000));
        [V::from_words(even), V::from_words(odd)]
    }

    #[inline(always)]
    unsafe fn load<V: Lanes>(from: *const u16) -> V {
        V::from_bf16(V::load_half(from))
    }

    #[inline(always)]
    unsafe fn store<V: Lanes>(lanes: V, to: *mut u16) {
        V::store_half(lanes.to_bf16(), to);
    }

    #[inline(always)]
    unsafe fn stream<V: Lanes>(lanes: V, to: *mut u16) {
        V::stream_half(lanes.to_bf16(), to);
    }
}

impl LanesFormat for Nothing {
    #[inline(always)]
    unsafe fn load<V: Lanes>(_: *const ()) -> V {
        V::splat(0.0)
    }

    #[inline(always)]
    unsafe fn store<V: Lanes>(_: V, _: *mut ()) {}

    #[inline(always)]
    unsafe fn stream<V: Lanes>(_: V, _: *mut ()) {}
}
