//! Dials servers: control connections, and data connections whose payloads can bypass HTTP/2.

use std::{
    future::Future,
    io,
    pin::Pin,
    task::{Context, Poll},
};

use http::Uri;
use hyper_util::rt::TokioIo;
use longshore_wire::{
    direct::{Dialled, Direct, Side, Taps},
    tls::{Credentials, DialError},
};
use tokio::net::{TcpStream, UnixStream};
use tower_service::Service;

use super::pace::{Pace, Paced};

type Dialling<T> = Pin<Box<dyn Future<Output = Result<TokioIo<T>, DialError>> + Send>>;

/// Connector of a control connection. tonic calls it for the first connection and after each break.
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

impl Service<Uri> for Dialler {
    type Response = TokioIo<Dialled>;
    type Error = DialError;
    type Future = Dialling<Dialled>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), DialError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let dialler = self.clone();
        Box::pin(async move { Ok(TokioIo::new(dialler.dial(&uri).await?)) })
    }
}

/// Connector of a data connection, called by tonic.
#[derive(Clone)]
pub(super) struct Connector {
    dialler: Dialler,
    window: usize,
    taps: Taps,
    pace: Option<Pace>,
}

impl Connector {
    /// `window` is the number of bytes that HTTP/2 grants the server.
    pub(super) fn new(dialler: Dialler, window: usize, taps: Taps, pace: Option<&Pace>) -> Connector {
        Connector { dialler, window, taps, pace: pace.cloned() }
    }
}

impl Service<Uri> for Connector {
    type Response = TokioIo<Direct<Paced<Dialled>>>;
    type Error = DialError;
    type Future = Dialling<Direct<Paced<Dialled>>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), DialError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let Connector { dialler, window, taps, pace } = self.clone();
        Box::pin(async move {
            let socket = Paced::new(dialler.dial(&uri).await?, pace.as_ref());
            Ok(TokioIo::new(Direct::new(socket, Side::Client, window, taps)))
        })
    }
}
