//! Payloads through shared memory: gradients in memory that servers of this host can read, weights in the servers'
//! memory.

mod arena;
mod link;

pub(crate) use self::{
    arena::{Arena, Extent, Piece},
    link::Link,
};
