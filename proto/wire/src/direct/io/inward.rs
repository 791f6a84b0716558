//! Where the reading of a connection stands.

use crate::direct::outward::Header;

/// What the socket's next bytes are.
pub(super) enum Inward {
    Preface,
    Header,
    /// A header that is allowed. It is not known yet where its frame goes.
    Frame(Header),
    /// Bytes that go to h2.
    Pass {
        left: usize,
    },
    /// Bytes of what is not HTTP/2, or the end of the stream.
    Raw,
    Divert {
        stream: usize,
        left: usize,
        padding: usize,
    },
    /// Nothing more is read.
    Over,
}
