//! The reference: plain Rust over slices, one element at a time. Runs on any CPU, and does the ends of slices
//! for the vector kernels, whose tests compare with it.

#![forbid(unsafe_code)]

pub(super) mod convert;
mod floats;
pub(super) mod low;
mod statistics;

pub(super) use self::floats::{
    accumulate, accumulate_statistics, cast, resume_exact, resume_statistics, statistics, update, widen,
};
pub(super) use self::low::{decode, encode, update_low};
pub use self::statistics::Statistics;
pub(super) use self::statistics::{Exact, SUMS, Sum, TILE};
