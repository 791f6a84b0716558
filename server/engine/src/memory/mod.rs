//! Buffers of exact size, huge-page backed, allocated and touched once at admission.

mod region;
mod slab;

pub use region::{Mapping, Region};
pub use slab::{AllocationError, Slab};
