//! The socket of a connection that has shaken hands.

use std::{
    future::poll_fn,
    io::{self, IoSlice, IoSliceMut},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::SystemTime,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
};

use super::{handshake::Shaken, stream::Stream};
use crate::direct::Socket;

/// What both ends say that they speak: HTTP/2.
pub(super) const ALPN: &[u8] = b"h2";

/// What the other end has proved by a certificate.
#[derive(Debug)]
pub(super) struct Shown {
    /// See [`Socket::certificate`].
    pub(super) name: Arc<str>,
    pub(super) expires: Option<SystemTime>,
}

/// TCP with TLS. Its [`Socket`] copies what was opened straight to the payload's place. One task has to poll both directions: a read
/// also sends what waits, and takes over its waker.
#[derive(Debug)]
pub struct Secured {
    stream: Stream<TcpStream>,
    shown: Option<Shown>,
}

impl Secured {
    /// # Errors
    /// Where the other end has not said that it speaks HTTP/2.
    pub(super) fn new(shaken: Shaken<TcpStream>, shown: Option<Shown>) -> io::Result<Secured> {
        if shaken.protocol.as_deref() != Some(ALPN) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "the other end did not ask for HTTP/2 (ALPN h2)",
            ));
        }
        Ok(Secured { stream: shaken.stream, shown })
    }

    /// Waits for the server's first bytes. With TLS 1.3 a client has shaken hands before the server has seen its
    /// certificate; a server that refuses it says so instead of these.
    pub(super) async fn greeted(mut self) -> io::Result<Secured> {
        if !poll_fn(|context| self.stream.poll_data(context)).await? {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(self)
    }
}

impl Socket for Secured {
    fn poll_read_into(
        &mut self,
        context: &mut Context<'_>,
        places: &mut [IoSliceMut<'_>],
    ) -> Poll<io::Result<usize>> {
        self.stream.poll_read_into(context, places)
    }

    fn certificate(&self) -> Option<Arc<str>> {
        self.shown.as_ref().map(|shown| Arc::clone(&shown.name))
    }

    fn expires(&self) -> Option<SystemTime> {
        self.shown.as_ref()?.expires
    }

    fn size_buffers(&self) {
        self.stream.size_buffers();
    }
}

impl AsyncRead for Secured {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_read(context, out)
    }
}

impl AsyncWrite for Secured {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(context)
    }
}
