//! Payloads through shared memory: gradients in memory that servers of this host can read, weights in the servers'
//! memory.

mod arena;
mod images;
mod link;

pub use self::{arena::GradientMemory, images::ImageMemory};
pub(crate) use self::{
    arena::{Arena, Extent, Piece},
    link::Link,
};
