//! The way of gradients: assembled into chunks, retained until committed, sent over several connections per server.

mod assembler;
mod lane;
mod outbox;
mod refusal;
mod retained;

pub use assembler::Assembler;
pub(crate) use assembler::{Collector, Way};
pub(crate) use lane::{Lanes, start_lanes};
pub(crate) use outbox::Outbox;
pub use retained::ChunkKey;
pub(crate) use retained::{Payload, Retained};
