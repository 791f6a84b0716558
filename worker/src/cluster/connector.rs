//! Dials a data connection whose payloads can go past HTTP/2.

use std::{
    future::Future,
    io,
    pin::Pin,
    task::{Context, Poll},
};

use http::Uri;
use hyper_util::rt::TokioIo;
use longshore_wire::direct::{Dialled, Direct, Side, Taps};
use tokio::net::{TcpStream, UnixStream};
use tower_service::Service;

use super::pace::{Pace, Paced};

/// What tonic dials through, the first time and after each break.
#[derive(Clone)]
pub(super) struct Connector {
    /// The Unix socket's path; None for TCP.
    path: Option<String>,
    window: usize,
    taps: Taps,
    pace: Option<Pace>,
}

impl Connector {
    /// Dials an address that was checked. `window` is what HTTP/2 grants the server.
    pub(super) fn new(address: &str, window: usize, taps: Taps, pace: Option<&Pace>) -> Connector {
        // tonic reads `unix:/path` or `unix:///path` in this way.
        let path =
            address.strip_prefix("unix:").map(|path| path.strip_prefix("//").unwrap_or(path).to_string());
        Connector { path, window, taps, pace: pace.cloned() }
    }
}

impl Service<Uri> for Connector {
    type Response = TokioIo<Direct<Paced<Dialled>>>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let Connector { path, window, taps, pace } = self.clone();
        Box::pin(async move {
            let socket = match path {
                Some(path) => Dialled::Unix(UnixStream::connect(path).await?),
                None => Dialled::Tcp(dial_tcp(&uri).await?),
            };
            let socket = Paced::new(socket, pace.as_ref());
            Ok(TokioIo::new(Direct::new(socket, Side::Client, window, taps)))
        })
    }
}

async fn dial_tcp(uri: &Uri) -> io::Result<TcpStream> {
    let absent = || io::Error::new(io::ErrorKind::InvalidInput, "no host and port");
    let (host, port) = uri.host().zip(uri.port_u16()).ok_or_else(absent)?;
    // An IPv6 address is in brackets.
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let socket = TcpStream::connect((host, port)).await?;
    // Nagle's algorithm and delayed acknowledgements together cost 40 ms whenever a small message follows another.
    socket.set_nodelay(true)?;
    Ok(socket)
}
