//! The socket of a connection after its handshake.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::SystemTime,
};

use longshore_proto::limits::MOST_CHAIN_BYTES;
use rustls::{Error, InvalidMessage};
use tokio::{
    io::{AsyncBufReadExt, AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
};
use tokio_rustls::TlsStream;

use super::files::length;
use crate::direct::{Certificate, Socket};

/// ALPN name of the protocol that both ends announce: HTTP/2.
pub(super) const ALPN: &[u8] = b"h2";

/// Identity that the peer has proved by a certificate.
#[derive(Debug)]
pub(super) struct Shown {
    /// See [`Socket::certificate`].
    pub(super) certificate: Arc<Certificate>,
    pub(super) expires: Option<SystemTime>,
}

/// TCP with TLS.
#[derive(Debug)]
pub struct Secured {
    stream: TlsStream<TcpStream>,
    shown: Option<Shown>,
}

impl Secured {
    /// Wraps a stream after its handshake.
    ///
    /// # Errors
    /// If the peer did not announce HTTP/2, or its certificates are too long to keep.
    pub(super) fn new(stream: TlsStream<TcpStream>, shown: Option<Shown>) -> io::Result<Secured> {
        let (_, end) = stream.get_ref();
        if end.alpn_protocol() != Some(ALPN) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "the other end did not ask for HTTP/2 (ALPN h2)",
            ));
        }
        if length(end.peer_certificates().unwrap_or_default()) > MOST_CHAIN_BYTES {
            let error = Error::from(InvalidMessage::CertificatePayloadTooLarge);
            return Err(io::Error::new(io::ErrorKind::InvalidData, error));
        }
        Ok(Secured { stream, shown })
    }

    /// Waits for the server's first bytes. In TLS 1.3 a client's handshake ends before the server has checked
    /// its certificate. A server that refuses the certificate sends an alert instead of these bytes.
    pub(super) async fn greeted(mut self) -> io::Result<Secured> {
        if self.stream.fill_buf().await?.is_empty() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(self)
    }
}

impl Socket for Secured {
    fn certificate(&self) -> Option<Arc<Certificate>> {
        self.shown.as_ref().map(|shown| Arc::clone(&shown.certificate))
    }

    fn expires(&self) -> Option<SystemTime> {
        self.shown.as_ref()?.expires
    }

    fn size_buffers(&self) {
        self.stream.get_ref().0.size_buffers();
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
