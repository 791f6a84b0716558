//! The socket of a connection that has shaken hands.

use std::{
    future::poll_fn,
    io::{self, IoSlice},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::SystemTime,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
};
use tokio_rustls::TlsStream;

use super::buffered::Buffered;
use crate::direct::Socket;

/// What both ends say that they speak: HTTP/2.
pub(super) const ALPN: &[u8] = b"h2";
/// How much of the server's first words is kept while a client waits for them: its settings take less.
const FIRST_BYTES: usize = 64;

/// What the other end has proved by a certificate.
#[derive(Debug)]
pub(super) struct Shown {
    /// See [`Socket::certificate`].
    pub(super) name: Arc<str>,
    pub(super) expires: Option<SystemTime>,
}

/// TCP with TLS. Its [`Socket`] reads straight to the payload's place, as far as the room there reaches.
#[derive(Debug)]
pub struct Secured {
    stream: TlsStream<Buffered<TcpStream>>,
    /// What came before it was asked for.
    early: Vec<u8>,
    shown: Option<Shown>,
}

impl Secured {
    /// # Errors
    /// Where the other end has not said that it speaks HTTP/2.
    pub(super) fn new(stream: TlsStream<Buffered<TcpStream>>, shown: Option<Shown>) -> io::Result<Secured> {
        if stream.get_ref().1.alpn_protocol() != Some(ALPN) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "the other end did not ask for HTTP/2 (ALPN h2)",
            ));
        }
        Ok(Secured { stream, early: Vec::new(), shown })
    }

    /// Waits for the server's first bytes. With TLS 1.3 a client has shaken hands before the server has seen its
    /// certificate; a server that refuses it says so instead of these.
    pub(super) async fn greeted(mut self) -> io::Result<Secured> {
        let mut first = [0; FIRST_BYTES];
        let mut buffer = ReadBuf::new(&mut first);
        poll_fn(|context| Pin::new(&mut self.stream).poll_read(context, &mut buffer)).await?;
        if buffer.filled().is_empty() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.early = buffer.filled().to_vec();
        Ok(self)
    }
}

impl Socket for Secured {
    fn certificate(&self) -> Option<Arc<str>> {
        self.shown.as_ref().map(|shown| Arc::clone(&shown.name))
    }

    fn expires(&self) -> Option<SystemTime> {
        self.shown.as_ref()?.expires
    }

    fn size_buffers(&self) {
        self.stream.get_ref().0.socket.size_buffers();
    }
}

impl AsyncRead for Secured {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if !this.early.is_empty() {
            let now = out.remaining().min(this.early.len());
            out.put_slice(&this.early[..now]);
            this.early.drain(..now);
            return Poll::Ready(Ok(()));
        }
        ready!(Pin::new(&mut this.stream).poll_read(context, out))?;
        Poll::Ready(Ok(()))
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
