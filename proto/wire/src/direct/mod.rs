//! The way of payloads below HTTP/2: from the socket straight to their place.
//!
//! h2 reads each DATA frame into memory of its own, and its user must copy it from there. [`Direct`] sits between the
//! socket and h2 and looks at the headers of frames. It passes all of them to h2, but for the DATA frames of a stream
//! with a [`Tap`]: their payload is read from the socket to where the tap's [`Sink`](crate::sink::Sink) says. h2 neither
//! sees nor counts it, so `Direct` gives the windows back once the bytes have been taken.
//!
//! hyper does not tell its users which stream a call has. So whoever makes a call that may be tapped puts a [`Mark`]
//! before its first message, in a protobuf field that others skip, and `Direct` looks for it at the start of DATA
//! frames: on a server in those that come in, for calls with large requests; on a client in those that go out, for
//! calls with large answers. A peer that sends no mark has nothing but HTTP/2 at the other end.

mod allowances;
mod bounds;
mod conduct;
mod credit;
mod io;
mod outgoing;
mod outlet;
mod outward;
mod socket;
mod tap;

pub use crate::mark::Mark;
pub use bounds::{Bounds, Held, Standing};
pub use io::{Connection, Direct, Side};
pub use outgoing::{Payloads, blank};
pub use socket::{LOOPBACK_BYTES, Socket, UNIX_BYTES};
pub use tap::{Claim, Tap, Taps};
