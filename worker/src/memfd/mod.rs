//! Payloads through shared memory: gradients in memory of this rank that servers of the host map, weights in the
//! servers' memory.

mod arena;
mod link;

pub use self::{arena::GradientMemory, link::ImageMemory};
pub(crate) use self::{
    arena::{Arena, Extent, Piece},
    link::Link,
};
