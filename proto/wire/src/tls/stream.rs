//! A socket with TLS, once hands are shaken: what is read from it is opened, what is written to it is sealed.
//!
//! rustls' own stream copies what comes twice more, reads 4 KiB at a time, and takes memory from the allocator for each record. So
//! rustls shakes hands and makes the keys, as it does where a kernel seals and opens ([`rustls::kernel`]), and the records are
//! handled here.

use std::{
    fmt,
    io::{self, IoSlice, IoSliceMut},
    pin::Pin,
    task::{Context, Poll, ready},
};

use rustls::{ContentType, Error, InvalidMessage, crypto::cipher::OutboundChunks};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::{
    incoming::Incoming,
    keys::Keys,
    messages::{Messages, Said, alert_for},
    outgoing::Outgoing,
};
use crate::direct::Socket;

/// The most data of one record.
const RECORD_BYTES: usize = 1 << 14;
/// How much data is sealed before the records are written. Each write may wake the other end, which takes longer than to seal a
/// record: both ends take 0.62 s of CPU time a GB with 64 KiB, 0.56 with this, and 0.53 with 256. It bounds what is kept.
const TURN_BYTES: usize = 8 * RECORD_BYTES;
/// A record's header, type and tag, and all of a short message.
const OVERHEAD_BYTES: usize = 32;
const FATAL: u8 = 2;

/// See the module.
pub(super) struct Stream<S> {
    socket: S,
    keys: Keys,
    incoming: Incoming,
    messages: Messages,
    outgoing: Outgoing,
    /// The other end wants this end to have a new key too.
    owes_key: bool,
    /// The other end has said that nothing more comes.
    over: bool,
    /// This end has said so.
    closed: bool,
    failed: Option<Error>,
}

impl<S> fmt::Debug for Stream<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream")
            .field("over", &self.over)
            .field("failed", &self.failed)
            .finish_non_exhaustive()
    }
}

impl<S: Socket> Stream<S> {
    /// `incoming` has what came behind the handshake.
    pub(super) fn new(socket: S, keys: Keys, incoming: Incoming) -> Stream<S> {
        Stream {
            socket,
            keys,
            incoming,
            messages: Messages::default(),
            outgoing: Outgoing::default(),
            owes_key: false,
            over: false,
            closed: false,
            failed: None,
        }
    }

    #[cfg(any(test, fuzzing))]
    pub(super) fn socket(&mut self) -> &mut S {
        &mut self.socket
    }

    #[cfg(any(test, fuzzing))]
    pub(super) fn keys(&mut self) -> &mut Keys {
        &mut self.keys
    }

    /// Opens records until one has data. Returns false where more must come first, and at the end.
    fn open(&mut self) -> Result<bool, Error> {
        while !self.incoming.has_opened() && !self.over {
            let Some(record) = self.incoming.next_record()? else { return Ok(false) };
            let sealed = record.len();
            let (kind, bytes) = self.keys.open(record)?;
            let content = &record[..bytes];
            let said = match kind {
                ContentType::ApplicationData => {
                    self.messages.data(bytes)?;
                    self.incoming.open(sealed, bytes);
                    Said::Nothing
                }
                ContentType::Alert => self.messages.alert(content)?,
                ContentType::Handshake => self.messages.handshake(content, self.keys.is_client())?,
                _ => return Err(InvalidMessage::InvalidContentType.into()),
            };
            match said {
                Said::Nothing => {}
                Said::NewKey { answer } => {
                    self.keys.update_opening()?;
                    self.owes_key |= answer;
                }
                Said::Closed => self.over = true,
            }
        }
        Ok(self.incoming.has_opened())
    }

    /// The connection ends with this error, of which the other end is told.
    fn fail(&mut self, error: Error) {
        if let Some(alert) = alert_for(&error).filter(|_| !self.closed) {
            // If it cannot be sealed, the connection's end must say enough.
            let _ = self.seal_alert([FATAL, alert.into()]);
        }
        (self.failed, self.closed) = (Some(error), true);
    }

    /// The error that has ended the connection.
    fn check(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        let Some(error) = self.failed.clone() else { return Ok(()) };
        // The other end is told as far as its socket takes it now. Nobody waits for that.
        let _ = self.poll_send(context);
        Err(io::Error::new(io::ErrorKind::InvalidData, error))
    }

    /// Reads until there is data. Returns false at the end.
    pub(super) fn poll_data(&mut self, context: &mut Context<'_>) -> Poll<io::Result<bool>> {
        // Whoever reads alone makes what waits go on too. If that fails the next write says so; what has come is read first.
        let _ = self.poll_send(context);
        loop {
            self.check(context)?;
            match self.open() {
                Ok(true) => return Poll::Ready(Ok(true)),
                Ok(false) if self.over => return Poll::Ready(Ok(false)),
                Ok(false) => {}
                Err(error) => {
                    self.fail(error);
                    continue;
                }
            }
            let room = self.incoming.room();
            let count = ready!(self.socket.poll_read_into(context, &mut [IoSliceMut::new(room)]))?;
            if count == 0 {
                return Poll::Ready(Err(cut()));
            }
            self.incoming.filled(count);
        }
    }

    /// Seals some of the data. Returns how much.
    fn seal(&mut self, slices: &[IoSlice<'_>]) -> Result<usize, Error> {
        let chunks: Vec<&[u8]> = slices.iter().map(|slice| &**slice).collect();
        let mut rest = OutboundChunks::new(&chunks).split_at(TURN_BYTES).0;
        let count = rest.len();
        let records = self.outgoing.room(count + (count / RECORD_BYTES + 3) * OVERHEAD_BYTES);
        if std::mem::take(&mut self.owes_key) {
            self.keys.update_sealing(records)?;
        }
        while !rest.is_empty() {
            let (now, later) = rest.split_at(RECORD_BYTES);
            self.keys.seal(ContentType::ApplicationData, &now, records)?;
            rest = later;
        }
        Ok(count)
    }

    fn seal_alert(&mut self, alert: [u8; 2]) -> Result<(), Error> {
        let records = self.outgoing.room(OVERHEAD_BYTES);
        self.keys.seal(ContentType::Alert, &OutboundChunks::Single(&alert), records)
    }

    /// Writes what is sealed.
    fn poll_send(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.outgoing.is_empty() {
            let socket = Pin::new(&mut self.socket);
            let count = ready!(socket.poll_write(context, self.outgoing.rest()))?;
            if count == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.outgoing.advance(count);
        }
        Poll::Ready(Ok(()))
    }
}

/// The stream has ended, and the other end has not said so: anybody may have cut it.
fn cut() -> io::Error {
    let why = "the connection ended before the other end had closed it (no close_notify)";
    io::Error::new(io::ErrorKind::UnexpectedEof, why)
}

impl<S: Socket> Socket for Stream<S> {
    fn poll_read_into(
        &mut self,
        context: &mut Context<'_>,
        places: &mut [IoSliceMut<'_>],
    ) -> Poll<io::Result<usize>> {
        let mut count = 0;
        for place in places {
            let mut place = &mut place[..];
            while !place.is_empty() {
                // What is there already is taken, but nobody waits for more of it.
                let more = match count {
                    0 => ready!(self.poll_data(context))?,
                    _ => {
                        self.failed.is_none()
                            && self.open().unwrap_or_else(|error| {
                                self.fail(error);
                                false
                            })
                    }
                };
                if !more {
                    return Poll::Ready(Ok(count));
                }
                let now = self.incoming.take(place);
                place = &mut place[now..];
                count += now;
            }
        }
        Poll::Ready(Ok(count))
    }

    fn size_buffers(&self) {
        self.socket.size_buffers();
    }
}

impl<S: Socket> AsyncRead for Stream<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let place = out.initialize_unfilled();
        let count = ready!(self.get_mut().poll_read_into(context, &mut [IoSliceMut::new(place)]))?;
        out.advance(count);
        Poll::Ready(Ok(()))
    }
}

impl<S: Socket> AsyncWrite for Stream<S> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(context, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        this.check(context)?;
        // Nothing is sealed while the socket takes nothing: this bounds what lies here.
        ready!(this.poll_send(context))?;
        if this.closed {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        let count = match this.seal(slices) {
            Ok(count) => count,
            Err(error) => {
                this.fail(error);
                this.check(context)?;
                0
            }
        };
        // What the socket does not take now, it takes at the next call, or when this is flushed.
        if let Poll::Ready(sent) = this.poll_send(context) {
            sent?;
        }
        Poll::Ready(Ok(count))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        ready!(this.poll_send(context))?;
        Pin::new(&mut this.socket).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        const CLOSE_NOTIFY: [u8; 2] = [1, 0];
        let this = self.get_mut();
        if !std::mem::replace(&mut this.closed, true) {
            let sealed = this.seal_alert(CLOSE_NOTIFY);
            sealed.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        }
        ready!(this.poll_send(context))?;
        match ready!(Pin::new(&mut this.socket).poll_shutdown(context)) {
            Err(error) if error.kind() != io::ErrorKind::NotConnected => Poll::Ready(Err(error)),
            _ => Poll::Ready(Ok(())),
        }
    }
}
