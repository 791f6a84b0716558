//! A server's address: checked before it is dialled, and dialled. Payloads of its connections can bypass HTTP/2.

use std::{
    future::Future,
    io,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use http::Uri;
use hyper_util::rt::TokioIo;
use longshore_proto::{Fault, limits::CHUNK_BYTES};
use longshore_wire::{
    Channel,
    direct::{Dialled, Direct, Side, Taps},
    tls::{Credentials, DialError},
};
use tokio::net::{TcpStream, UnixStream};
use tonic::transport::{Endpoint, Error};
use tower_service::Service;

use super::pace::{Pace, Paced};

/// The largest HTTP/2 frame: one whole chunk. Each frame costs a write and some reads. Pulls take 0.44 s of CPU
/// time a GB with 1 MiB frames, and took 0.58 s with 64 KiB.
const FRAME_BYTES: u32 = CHUNK_BYTES as u32;
/// How often a silent peer is pinged, and how long its answer may take. A dead peer (power loss, a cut cable) is
/// found within twice this time.
pub(super) const KEEP_ALIVE: Duration = Duration::from_secs(10);
pub(super) const CONNECT: Duration = Duration::from_secs(5);

/// A checked address, with the connector that dials it.
#[derive(Clone)]
pub struct Address {
    endpoint: Endpoint,
    dialler: Dialler,
}

impl Address {
    /// Parses `host:port`, `http://host:port`, `https://host:port`, or `unix:/path` for a server on the same host.
    /// With credentials TCP is encrypted.
    ///
    /// # Errors
    /// For any other form, and for a scheme that contradicts the credentials.
    pub fn new(address: &str, credentials: Option<&Credentials>) -> Result<Address, Fault> {
        let refuse = |cause: &str, remedy: &str| {
            let limit = "host:port, http://host:port, https://host:port or unix:/path";
            Fault::invalid("options.servers", format!("{address:?}, {cause}"), limit, remedy)
        };
        let invalid = |cause: &str| refuse(cause, "correct it");
        let path = address.strip_prefix("unix:");
        if path.is_some_and(|path| !path.starts_with('/')) {
            return Err(invalid("not an absolute path"));
        }
        let (encrypted, url) = match address.strip_prefix("https://") {
            Some(rest) => (Some(true), format!("http://{rest}")),
            None if address.starts_with("http://") => (Some(false), address.to_string()),
            None if path.is_some() || address.contains("://") => (None, address.to_string()),
            None => (None, format!("http://{address}")),
        };
        let endpoint = Endpoint::from_shared(url).map_err(|error| invalid(&error.to_string()))?;
        if path.is_none() && (endpoint.uri().scheme_str() != Some("http") || endpoint.uri().port().is_none())
        {
            return Err(invalid("no port, or neither http nor https"));
        }
        match (encrypted, credentials) {
            (Some(true), None) => {
                let remedy =
                    "name the folder of its certificates with --tls-dir, tls_dir= or LONGSHORE_TLS_DIR";
                return Err(refuse("https without a TLS folder", remedy));
            }
            (Some(false), Some(_)) => {
                return Err(refuse("http beside a TLS folder", "leave http:// out, or the folder"));
            }
            _ => {}
        }
        let endpoint = endpoint
            .tcp_nodelay(true)
            .connect_timeout(CONNECT)
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .max_frame_size(FRAME_BYTES)
            .http2_keep_alive_interval(KEEP_ALIVE)
            .keep_alive_timeout(KEEP_ALIVE);
        Ok(Address { endpoint, dialler: Dialler::new(address, credentials) })
    }

    /// Opens a connection for calls without large payloads.
    ///
    /// # Errors
    /// If no server answers, or if one end does not trust the other.
    pub async fn connect(&self) -> Result<Channel, Error> {
        self.connect_with(Taps::default(), None).await
    }

    /// Opens a connection whose payloads can bypass HTTP/2 by `taps`.
    pub(super) async fn connect_with(&self, taps: Taps, pace: Option<&Pace>) -> Result<Channel, Error> {
        let connector = Connector::new(self.dialler.clone(), taps, pace);
        let channel = self.endpoint.connect_with_connector(connector).await?;
        Ok(Channel::new(channel, self.dialler.credentials().cloned()))
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_checked_before_dialling() {
        for good in
            ["localhost:7070", "http://10.0.0.1:7070", "[::1]:7070", "unix:/run/l.sock", "unix:///run/l.sock"]
        {
            assert!(Address::new(good, None).is_ok(), "{good}");
        }
        for bad in
            ["", "localhost", "https://host:1", "http://", "a b:1", "unix:", "unix:l.sock", "ftp://host:1"]
        {
            let fault = Address::new(bad, None).err().expect(bad);
            assert_eq!(fault.field, "options.servers", "{bad}");
        }
    }
}
