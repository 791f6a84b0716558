//! Sends gradients: they are assembled into chunks, retained until their step is committed, and sent over several
//! connections to each server.

mod accumulator;
mod assembler;
mod gradients;
mod ids;
mod lane;
mod nothing;
mod outbox;
mod queues;
mod refusal;
mod retained;

use std::ops::Range;

pub(crate) use accumulator::Accumulator;
pub use assembler::Assembler;
pub(crate) use assembler::{Collector, Sums};
pub(crate) use gradients::{Gradients, Way};
pub use ids::ChunkKey;
pub(crate) use lane::start_lanes;
pub(crate) use outbox::Outbox;
pub(crate) use retained::Payload;

use crate::error::Result;

/// Puts a range of a gradient's elements into the memory for them, in the wire's type. Where it fails, the chunk that they are in
/// does not leave.
pub type Write<'a> = dyn FnMut(Range<usize>, &mut [u8]) -> Result<()> + 'a;
