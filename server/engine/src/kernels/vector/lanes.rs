//! What an instruction set must supply: 16 lanes of f32 and the few operations the loops are made of.

use super::super::LANES;
use super::super::scalar::convert::{Bf16, F16, F32, Format};

/// Sixteen f32 lanes. Each method does in every lane what the scalar reference does for one element, bit for bit,
/// except that a NaN may be any NaN until [`quiet`](Lanes::quiet).
///
/// Methods are `#[inline(always)]` without `#[target_feature]`, and so are all generic loops over them: they are
/// compiled inside the one function per kernel that has the feature enabled (see `entry_points!`). A method that
/// is not inlined there would call every intrinsic as a function.
///
/// # Safety
/// For all methods: this CPU has the instruction set of the implementing type, and pointers are valid for 16
/// elements, with no alignment beyond the element's own unless the method says so.
pub(in super::super) trait Lanes: Copy {
    /// Sixteen 16-bit patterns.
    type Half: Copy;
    /// Sixteen f64 lanes.
    type Sums: Copy;

    /// Where streaming stores must begin, in bytes: 1 if they are ordinary stores.
    const STREAM_ALIGNMENT: usize;

    unsafe fn splat(x: f32) -> Self;
    unsafe fn load(from: *const f32) -> Self;
    unsafe fn store(self, to: *mut f32);
    /// A store to memory that is not read soon; `to` is aligned to [`STREAM_ALIGNMENT`](Lanes::STREAM_ALIGNMENT).
    unsafe fn stream(self, to: *mut f32);

    unsafe fn add(self, other: Self) -> Self;
    unsafe fn sub(self, other: Self) -> Self;
    unsafe fn mul(self, other: Self) -> Self;
    unsafe fn div(self, other: Self) -> Self;
    unsafe fn sqrt(self) -> Self;
    /// -1, 0 or 1; +0 for both zeros, NaN for NaN.
    unsafe fn sign(self) -> Self;
    /// Any NaN becomes the canonical one.
    unsafe fn quiet(self) -> Self;

    unsafe fn load_half(from: *const u16) -> Self::Half;
    unsafe fn store_half(half: Self::Half, to: *mut u16);
    /// As [`stream`](Lanes::stream), but any multiple of 16 elements from an aligned address will do.
    unsafe fn stream_half(half: Self::Half, to: *mut u16);
    unsafe fn from_f16(half: Self::Half) -> Self;
    unsafe fn from_bf16(half: Self::Half) -> Self;
    /// Of lanes that went through [`quiet`](Lanes::quiet).
    unsafe fn to_f16(self) -> Self::Half;
    /// Of lanes that went through [`quiet`](Lanes::quiet).
    unsafe fn to_bf16(self) -> Self::Half;

    unsafe fn no_sums() -> Self::Sums;
    /// Adds each lane's exact square to the same lane of `sums`.
    unsafe fn add_squares(self, sums: Self::Sums) -> Self::Sums;
    unsafe fn spill(sums: Self::Sums) -> [f64; LANES];

    /// Orders streaming stores before whatever other threads are told next.
    unsafe fn fence();
}

/// An element format, 16 elements at a time. Safety as for [`Lanes`].
pub(super) trait LanesFormat: Format {
    unsafe fn load<V: Lanes>(from: *const Self::Bits) -> V;
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
