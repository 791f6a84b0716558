//! Memory with more than one party to it: mapped, shared with other processes, lent to threads that outlive a
//! borrow.
//!
//! A Rust slice promises that nobody changes its bytes while it lives. The writers of the bytes decide which
//! type stands for them:
//!
//! | written by | type | how it is read |
//! |---|---|---|
//! | its owner alone | [`Region`] | as a slice |
//! | another process | [`Foreign`], [`Source`] | volatile copies, and kernels that load each element once |
//! | another thread of this process | [`SharedBytes`] | by the kernel, which is given the address |
//!
//! Only this crate makes mappings, and pointers into mappings.

#![allow(unsafe_code)]

mod allocator;
mod copy;
mod file;
pub mod float;
mod foreign;
pub mod lend;
mod map;
#[cfg(all(test, loom))]
mod models;
mod region;
mod shared;
mod slab;
mod source;
mod stamp;
mod sync;
mod traffic;

pub use allocator::few_arenas;
pub use copy::copy_past_caches;
pub use file::SharedFile;
pub use foreign::{Foreign, ForeignError};
pub use region::{AtomicWords, Mapping, Region};
pub use shared::{MOST_PARTS, Part, SharedBytes, write_parts};
pub use slab::{AllocationError, Near, Slab};
pub use source::{Element, Source};
pub use traffic::Traffic;
