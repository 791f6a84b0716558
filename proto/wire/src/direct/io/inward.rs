//! Position in the incoming byte stream.

use crate::direct::outward::Header;

/// Meaning of the socket's next bytes.
pub(super) enum Inward {
    Preface,
    Header,
    /// An allowed header. The route of its frame is not chosen yet.
    Frame(Header),
    /// Bytes for h2.
    Pass {
        left: usize,
    },
    /// Bytes of another protocol than HTTP/2, or the end of the stream.
    Raw,
    Divert {
        stream: usize,
        left: usize,
        padding: usize,
    },
    /// Reading has stopped.
    Over,
}
