//! Buffers of exact size, huge-page backed, allocated and touched once at admission.

pub(crate) mod lend;
mod region;
mod shared;
mod slab;
mod traffic;

pub use region::{Glimpse, Mapping, Region, Words};
pub use shared::SharedFile;
pub use slab::{AllocationError, Slab};
pub use traffic::Traffic;
