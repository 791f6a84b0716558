//! gRPC messages below the codec. A chunk's payload moves between the socket's buffer and its place without a
//! message of its own in between.
//!
//! Generated stubs would send the same bytes, but through a codec. A codec must hold a whole message in one buffer, so
//! it copies once on sending and twice on receiving. With these copies a GB took 0.65 s of CPU time, against 0.28 s
//! without.

mod call;
mod encode;
mod incoming;
mod intake;
mod parse;
#[cfg(test)]
mod tests;

pub use crate::mark::Piece;
pub use call::{PULL, PUSH, Pieces, answer, call, call_once};
pub use encode::{encode, encode_with, keep_buffers};
pub use incoming::Incoming;
pub use intake::{Intake, SharedIntake};
pub use parse::{Event, Parser};

use bytes::Bytes;
use longshore_proto::{
    Fault,
    limits::{CHUNK_BYTES, CHUNK_HEADROOM_BYTES, MAX_PULL_SLICES},
};
use prost::Message;

use crate::{request::Request, v1};

/// A message of the data plane.
pub trait Frame: Message + Default + 'static {
    /// Field number of the payload, which is delivered in slices. Stock clients write fields in the order of their
    /// numbers, so the payload has the highest number.
    const PAYLOAD: Option<u32> = None;
    /// Largest message in bytes, as its length prefix announces it.
    const LIMIT: usize = CHUNK_BYTES + CHUNK_HEADROOM_BYTES;

    /// Refuses a message of many empty elements, which take 2 bytes each as sent and far more once decoded.
    fn check_memory(_: &[u8]) -> Result<(), Fault> {
        Ok(())
    }

    /// Takes the payload out of a message that was decoded whole.
    fn take_payload(&mut self) -> Bytes {
        Bytes::new()
    }
}

impl Frame for v1::PushRequest {
    const PAYLOAD: Option<u32> = Some(15);

    fn take_payload(&mut self) -> Bytes {
        std::mem::take(&mut self.payload)
    }
}

impl Frame for v1::PullResponse {
    const PAYLOAD: Option<u32> = Some(15);

    fn take_payload(&mut self) -> Bytes {
        std::mem::take(&mut self.payload)
    }
}

impl Frame for v1::PushResponse {}

impl Frame for v1::PullRequest {
    /// A slice takes at most 24 bytes, so a pull of [`MAX_PULL_SLICES`] fits.
    const LIMIT: usize = 25 * MAX_PULL_SLICES + CHUNK_HEADROOM_BYTES;

    fn check_memory(message: &[u8]) -> Result<(), Fault> {
        let most = Self::LIMIT + 48 * MAX_PULL_SLICES;
        let memory = Request::at(PULL).map_or(0, |request| request.examine(message).0);
        if memory <= most {
            return Ok(());
        }
        let limit = format!("at most {most}");
        Err(Fault::invalid("message", format!("{memory} bytes in memory"), limit, parse::SMALLER))
    }
}
