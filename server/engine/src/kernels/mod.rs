//! The arithmetic of a step: update, sum and convert, as free functions over slices of up to a block.
//!
//! All instruction sets give the same bits for the same input, whatever its length, alignment and split into calls.
//! Only [`statistics`] depend on where a slice begins and ends. The specification is the plain Rust in `scalar`.
//! `vector` writes each loop once more for 16 lanes of any instruction set, and `x86` and `aarch64` supply the lanes.
//! Approximate reciprocals are not used, denormals are not flushed, and every NaN has the same bits. Fused multiply-add
//! is used only for sums of squares, as specified.
//!
//! Nothing here allocates, locks or logs. Loops do not branch on the instruction set, the rule or the formats.

#![allow(unsafe_code)]

#[cfg(all(target_arch = "aarch64", target_endian = "little"))]
mod aarch64;
mod dispatch;
mod isa;
mod low;
mod rules;
mod scalar;
mod slices;
#[cfg(test)]
mod tests;
#[cfg(any(target_arch = "x86_64", all(target_arch = "aarch64", target_endian = "little")))]
mod vector;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use self::dispatch::{
    accumulate, accumulate_statistics, cast, decode, encode, statistics, update, update_low, widen,
};
pub use self::isa::{ISA_VARIABLE, Isa, IsaError};
pub use self::low::{
    Code, MasterFormat, MasterMut, Moment, MomentMut, QUANTIZATION_BLOCK, Random, StateFormat, StateLow,
    bytes_per_parameter,
};
pub use self::rules::Scalars;
pub use self::scalar::Statistics;
pub use self::slices::{Gradient, ImageMut, State};
pub use longshore_proto::{Hyper, Rule};
