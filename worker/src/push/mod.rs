//! Sends gradients: assembles them into chunks, and sends the chunks over several connections to each server. Chunks
//! are retained until no server can need them.

mod accumulator;
mod assembler;
mod gradients;
mod lane;
mod nothing;
mod outbox;
mod refusal;
mod retained;

use std::ops::Range;

pub(crate) use accumulator::Accumulator;
pub use assembler::{Assembler, Slot};
pub(crate) use assembler::{Collector, Sums};
pub(crate) use gradients::{Gradients, Way};
pub(crate) use lane::{open_lanes, start_lanes};
pub(crate) use outbox::Outbox;
pub use retained::ChunkKey;
pub(crate) use retained::Payload;

use crate::error::Result;

/// Writes a range of a gradient's elements into the given memory, in the wire's type. After a failure the chunk of the
/// elements does not leave.
pub type Write<'a> = dyn FnMut(Range<usize>, &mut [u8]) -> Result<()> + 'a;
