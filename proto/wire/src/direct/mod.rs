//! Payloads below HTTP/2: from the socket straight to their place.
//!
//! h2 reads each DATA frame into memory of its own, from which its user must copy. [`Direct`] sits between the socket
//! and h2 and inspects the headers of frames. All frames pass to h2, except the DATA frames of a stream with a [`Tap`].
//! Their payload is read from the socket to the place that the tap's [`Sink`](crate::sink::Sink) names. The crate h2
//! neither sees nor counts that payload, so `Direct` returns the windows once the bytes are taken.
//!
//! The crate hyper does not expose the stream of a call. So a tapped call's first message begins with a [`Mark`], in a
//! protobuf field that other readers skip. `Direct` looks for the mark at the start of DATA frames. A server looks in
//! incoming frames, for calls with large requests. A client looks in outgoing frames, for calls with large answers. A
//! peer that sends no mark gets plain HTTP/2.

mod allowances;
mod bounds;
mod conduct;
mod io;
mod ledger;
mod outgoing;
mod outward;
mod socket;
mod tap;

use std::sync::{Mutex, MutexGuard, PoisonError};

pub use crate::mark::Mark;
pub use allowances::network;
pub use bounds::{Bounds, Standing};
pub use io::{Connection, Direct, Kept, Side};
pub use ledger::{Account, Held, Owner};
pub use outgoing::{Payloads, blank};
pub use socket::{Certificate, Dialled, LOOPBACK_BYTES, Socket, UNIX_BYTES};
pub use tap::{Claim, Tap, Taps};

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
