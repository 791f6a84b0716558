//! An outgoing message.

use bytes::Bytes;

/// An encoded message. Its two parts become two DATA frames, and one write sends the small one with the large one.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Piece {
    pub head: Bytes,
    pub payload: Bytes,
}
