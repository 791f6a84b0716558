//! Dials servers, for connections whose payloads can bypass HTTP/2.

use std::{
    future::Future,
    io,
    pin::Pin,
    task::{Context, Poll},
};

use http::Uri;
use hyper_util::rt::TokioIo;
use longshore_proto::limits::CHUNK_BYTES;
use longshore_wire::{
    direct::{Dialled, Direct, Side, Taps},
    tls::{Credentials, DialError},
};
use tokio::net::{TcpStream, UnixStream};
use tower_service::Service;

use super::pace::{Pace, Paced};

type Dialling = Pin<Box<dyn Future<Output = Result<TokioIo<Direct<Paced<Dialled>>>, DialError>> + Send>>;

/// HTTP/2 window of a stream. A window above one chunk never holds a chunk up.
pub(super) const STREAM_WINDOW_BYTES: u32 = 16 * CHUNK_BYTES as u32;
pub(super) const CONNECTION_WINDOW_BYTES: u32 = 4 * STREAM_WINDOW_BYTES;

/// Dials a checked address.
#[derive(Clone)]
pub(super) struct Dialler {
    /// The Unix socket's path; None for TCP.
    path: Option<String>,
    /// Credentials for TLS over TCP. Unix sockets are never encrypted: the kernel tells whose process is at the
    /// other end.
    credentials: Option<Credentials>,
}

impl Dialler {
    /// Makes the dialler of a checked address.
    pub(super) fn new(address: &str, credentials: Option<&Credentials>) -> Dialler {
        // tonic reads `unix:/path` and `unix:///path` in the same way.
        let path =
            address.strip_prefix("unix:").map(|path| path.strip_prefix("//").unwrap_or(path).to_string());
        let credentials = credentials.filter(|_| path.is_none()).cloned();
        Dialler { path, credentials }
    }

    /// Credentials that encrypt these connections; None without encryption.
    pub(super) fn credentials(&self) -> Option<&Credentials> {
        self.credentials.as_ref()
    }

    async fn dial(&self, uri: &Uri) -> Result<Dialled, DialError> {
        if let Some(path) = &self.path {
            return Ok(Box::new(UnixStream::connect(path).await?));
        }
        let absent = || io::Error::new(io::ErrorKind::InvalidInput, "no host and port");
        let (host, port) = uri.host().zip(uri.port_u16()).ok_or_else(absent)?;
        // `uri.host()` keeps the brackets of an IPv6 address.
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let socket = TcpStream::connect((host, port)).await?;
        // Nagle's algorithm and delayed acknowledgements together cost 40 ms whenever one small message follows
        // another.
        socket.set_nodelay(true)?;
        match &self.credentials {
            Some(credentials) => Ok(Box::new(credentials.connect(socket, host).await?)),
            None => Ok(Box::new(socket)),
        }
    }
}

/// Connector of a connection. tonic calls it for the first connection and after each break.
#[derive(Clone)]
pub(super) struct Connector {
    dialler: Dialler,
    taps: Taps,
    pace: Option<Pace>,
}

impl Connector {
    pub(super) fn new(dialler: Dialler, taps: Taps, pace: Option<&Pace>) -> Connector {
        Connector { dialler, taps, pace: pace.cloned() }
    }
}

impl Service<Uri> for Connector {
    type Response = TokioIo<Direct<Paced<Dialled>>>;
    type Error = DialError;
    type Future = Dialling;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), DialError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Dialling {
        let Connector { dialler, taps, pace } = self.clone();
        Box::pin(async move {
            let socket = Paced::new(dialler.dial(&uri).await?, pace.as_ref());
            Ok(TokioIo::new(Direct::new(socket, Side::Client, CONNECTION_WINDOW_BYTES as usize, taps)))
        })
    }
}
