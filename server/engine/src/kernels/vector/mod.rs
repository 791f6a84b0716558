//! The loops, written once for 16 lanes of any instruction set. Each does the longest middle part of a slice
//! that is a multiple of 16 elements. The scalar reference does the ends.

#![allow(unsafe_code, unsafe_op_in_unsafe_fn)] // The contract of every function here is that of `Lanes`.

mod entry_points;
mod floats;
mod lanes;
mod low;
mod moments;
mod statistics;

pub(super) use self::entry_points::entry_points;
pub(super) use self::floats::{Kernels, cast, update, update_floats, update_low_moments, widen};
pub(super) use self::lanes::Lanes;
pub(super) use self::low::{decode, encode, update_low};
pub(super) use self::statistics::{accumulate, accumulate_statistics, statistics};
