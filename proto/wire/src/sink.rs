//! Sinks: parsers of a stream's bytes, which come from h2 or straight from the socket.

use std::io;

use bytes::Bytes;
use longshore_proto::fault::Fault;

/// Reads from the socket into a place, as [`io::Read::read`] does.
pub type Read<'a> = dyn FnMut(&mut [u8]) -> io::Result<usize> + 'a;

/// Kind of bytes that a sink takes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Bytes before a payload. The sink gets few at a time, since they are copied.
    Fields,
    /// Payload without a place of its own.
    Payload,
    /// At most this many bytes of payload, read straight to their place.
    Direct(usize),
    /// No bytes, until the call's task calls [`Claim::resume`](crate::direct::Claim::resume).
    Stalled,
}

/// Sink of a stream's bytes. The connection's task calls it, so it must not block.
pub trait Sink: Send {
    fn mode(&mut self) -> Mode;

    /// Takes bytes from the front: all of them, unless the sink stalls.
    fn put(&mut self, bytes: &mut Bytes);

    /// Reads payload to its place with one call of `read`. The bytes are at most `most`, and at most the number of
    /// [`Mode::Direct`].
    fn read(&mut self, most: usize, read: &mut Read<'_>) -> io::Result<usize>;
}

/// A sink for the payloads of messages. The intake calls `begin` and `end` around each message, and passes the bytes
/// in between, in [`Mode::Payload`] or [`Mode::Direct`].
pub trait MessageSink<M>: Sink {
    /// Takes the head of a message, whose payload of `bytes` follows. False: the sink stalls until
    /// [`SharedIntake::go_on`](crate::frame::SharedIntake::go_on).
    ///
    /// # Errors
    /// The fault that ends the stream.
    fn begin(&mut self, head: M, bytes: usize) -> Result<bool, Fault>;

    /// Completes the message. True: the stream's task must wake.
    ///
    /// # Errors
    /// The fault that ends the stream.
    fn end(&mut self) -> Result<bool, Fault>;
}
