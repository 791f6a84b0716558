//! Dialling of a server, whose address is checked first. Workers dial this way, and so do servers that fetch shards.

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
use tokio::net::{TcpStream, UnixStream};
use tonic::transport::Endpoint;
use tower_service::Service;

use crate::{
    Channel,
    direct::Dialled,
    tls::{Credentials, DialError},
};

/// The largest HTTP/2 frame: one whole chunk. Each frame costs a write and some reads. Pulls take 0.44 s of CPU
/// time a GB with 1 MiB frames, and took 0.58 s with 64 KiB.
const FRAME_BYTES: u32 = CHUNK_BYTES as u32;
/// Interval of pings to a silent peer, and time limit of the peer's answer. A dead peer (power loss, a cut cable) is
/// found within twice this time.
pub const KEEP_ALIVE: Duration = Duration::from_secs(10);
pub const CONNECT: Duration = Duration::from_secs(5);
/// HTTP/2 window of a stream. With more than one chunk, the window never holds a chunk up.
const STREAM_WINDOW_BYTES: u32 = 16 * CHUNK_BYTES as u32;
pub const CONNECTION_WINDOW_BYTES: u32 = 4 * STREAM_WINDOW_BYTES;

/// Parses `host:port`, `http://host:port`, `https://host:port`, or `unix:/path` for a server on the same host. With
/// credentials TCP is encrypted.
///
/// # Errors
/// For any other form, and for a scheme that contradicts the credentials.
pub fn endpoint(address: &str, credentials: Option<&Credentials>) -> Result<Endpoint, Fault> {
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
    if path.is_none() && (endpoint.uri().scheme_str() != Some("http") || endpoint.uri().port().is_none()) {
        return Err(invalid("no port, or neither http nor https"));
    }
    match (encrypted, credentials) {
        (Some(true), None) => {
            let remedy = "name the folder of its certificates with --tls-dir, tls_dir= or LONGSHORE_TLS_DIR";
            return Err(refuse("https without a TLS folder", remedy));
        }
        (Some(false), Some(_)) => {
            return Err(refuse("http beside a TLS folder", "leave http:// out, or the folder"));
        }
        _ => {}
    }
    Ok(endpoint
        .tcp_nodelay(true)
        .connect_timeout(CONNECT)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_frame_size(FRAME_BYTES)
        .http2_keep_alive_interval(KEEP_ALIVE)
        .keep_alive_timeout(KEEP_ALIVE))
}

/// Dials a checked address.
#[derive(Clone)]
pub struct Dialler {
    /// The Unix socket's path; None for TCP.
    path: Option<String>,
    /// Credentials for TLS over TCP. Unix sockets are never encrypted: the kernel tells whose process is at the
    /// other end.
    credentials: Option<Credentials>,
}

impl Dialler {
    /// Makes the dialler of a checked address.
    pub fn new(address: &str, credentials: Option<&Credentials>) -> Dialler {
        // tonic reads `unix:/path` and `unix:///path` in the same way.
        let path =
            address.strip_prefix("unix:").map(|path| path.strip_prefix("//").unwrap_or(path).to_string());
        let credentials = credentials.filter(|_| path.is_none()).cloned();
        Dialler { path, credentials }
    }

    /// Returns the credentials that encrypt the dialled connections. None without encryption.
    pub fn credentials(&self) -> Option<&Credentials> {
        self.credentials.as_ref()
    }

    /// # Errors
    /// If the server does not answer, or one end does not trust the other.
    pub async fn dial(&self, uri: &Uri) -> Result<Dialled, DialError> {
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
    type Future = Pin<Box<dyn Future<Output = Result<TokioIo<Dialled>, DialError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), DialError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let dialler = self.clone();
        Box::pin(async move { Ok(TokioIo::new(dialler.dial(&uri).await?)) })
    }
}

/// Opens a connection to another server.
///
/// # Errors
/// `Invalid` for a bad address, and `Unavailable` with the cause if the server does not answer.
pub async fn connect(address: &str, credentials: Option<&Credentials>) -> Result<Channel, Fault> {
    let (endpoint, dialler) = (endpoint(address, credentials)?, Dialler::new(address, credentials));
    let channel = endpoint.connect_with_connector(dialler).await.map_err(|error| {
        let cause = std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
        let remedy = "start that server, and see whether this one reaches it";
        Fault::new(
            longshore_proto::FaultKind::Unavailable,
            "server",
            format!("{address} ({cause})"),
            "reachable",
            remedy,
        )
    })?;
    Ok(Channel::new(channel, credentials.cloned()))
}
