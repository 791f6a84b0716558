//! Payloads through shared memory. Servers of the host map this rank's gradients, and this rank maps their weights.

mod arena;
mod link;

pub use self::{arena::GradientMemory, link::ImageMemory};
pub(crate) use self::{
    arena::{Arena, Extent, Piece},
    link::Link,
};
