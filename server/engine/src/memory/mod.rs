//! Buffers of exact size, huge-page backed, allocated and touched once at admission.

mod region;
mod slab;

pub use region::Region;
pub use slab::{AllocationError, Slab};
