//! The way of payloads below HTTP/2: from the socket straight to their place.
//!
//! h2 reads each DATA frame into memory of its own, from where its user must copy it. [`Direct`] sits between the socket
//! and h2 and looks at the headers of frames. All passes, but the DATA frames of a stream with a [`Tap`]: their payload
//! is read from the socket to where the tap's [`Sink`] says, and h2 never sees it. Nor does it count it, so that the
//! windows are given back here, once the bytes have been taken.
//!
//! Which stream a call has, hyper tells neither of its users. So whoever makes a call that may be tapped puts a [`Mark`]
//! before its first message, in a protobuf field that others skip, and `Direct` looks for it at the start of DATA frames:
//! of those that come in, on a server, for calls with large requests; of those that go out, on a client, for calls with
//! large answers. Who sends no mark has nothing but HTTP/2 at the other end.

mod bounds;
mod conduct;
mod credit;
mod io;
mod mark;
mod outward;
mod socket;
mod tap;

pub use bounds::{Bounds, Held, Standing};
pub use io::{Direct, Side};
pub use mark::Mark;
pub use socket::{Dialled, LOOPBACK_BYTES, Socket, UNIX_BYTES};
pub use tap::{Claim, Mode, Read, Sink, Tap, Taps};
