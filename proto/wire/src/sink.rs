//! A sink takes the bytes of one stream, whether they come through h2 or past it.

use std::io;

use bytes::Bytes;
use longshore_proto::fault::Fault;

/// Reads from the socket into a place, as [`io::Read::read`] does.
pub type Read<'a> = dyn FnMut(&mut [u8]) -> io::Result<usize> + 'a;

/// The kind of bytes that a sink can take next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The bytes before a payload. It takes few of them at a time, since they are copied.
    Fields,
    /// Payload that has no place of its own.
    Payload,
    /// At most so many bytes of payload, which are read straight to their place.
    Direct(usize),
    /// Nothing, until the call's task calls [`Claim::resume`](crate::direct::Claim::resume).
    Stalled,
}

/// Takes the bytes of a stream. The connection's task calls it, and it must not wait.
pub trait Sink: Send {
    fn mode(&mut self) -> Mode;

    /// Takes bytes from the front: all of them, unless it stalls.
    fn put(&mut self, bytes: &mut Bytes);

    /// Has payload read to its place with one call of `read`: at most `most` bytes, and at most as many as
    /// [`Mode::Direct`] said.
    fn read(&mut self, most: usize, read: &mut Read<'_>) -> io::Result<usize>;
}

/// A sink for the payloads of messages: it is told where each begins and ends, and takes all bytes in between, in
/// [`Mode::Payload`] or [`Mode::Direct`].
pub trait MessageSink<M>: Sink {
    /// Takes the head of a message, whose payload of `bytes` follows. False means that it cannot be taken yet; nothing
    /// more is given before [`SharedIntake::go_on`](crate::frame::SharedIntake::go_on).
    ///
    /// # Errors
    /// The fault that ends the stream.
    fn begin(&mut self, head: M, bytes: usize) -> Result<bool, Fault>;

    /// The message is whole. True means that the stream's task must look.
    ///
    /// # Errors
    /// The fault that ends the stream.
    fn end(&mut self) -> Result<bool, Fault>;
}
