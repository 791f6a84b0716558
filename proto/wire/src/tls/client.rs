//! TLS configuration and handshake of a client.

use std::{
    fmt, io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::SystemTime,
};

use http::HeaderValue;
use longshore_proto::{Fault, FaultKind};
use rustls::{ClientConfig, crypto::ring, pki_types::ServerName, version::TLS13};
use tokio::net::TcpStream;
use tokio_rustls::{TlsConnector, client::TlsStream};

use super::{
    files::{self, CA, CLIENT_CERTIFICATE, CLIENT_KEY, TOKEN},
    refusal::DialError,
    secured::{ALPN, Secured},
};

/// A client's credentials and trusted authorities. Clones share the credentials. Each dial reads the folder anew, so
/// the next connection uses a replaced certificate or token.
#[derive(Clone)]
pub struct Credentials {
    dir: PathBuf,
    /// Path of a token outside the folder.
    token: Option<PathBuf>,
    now: Arc<Mutex<Client>>,
}

/// Content of the folder from one read.
#[derive(Clone)]
pub struct Client {
    config: Arc<ClientConfig>,
    bearer: Option<HeaderValue>,
    expires: Option<SystemTime>,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Credentials").field(&self.dir).finish()
    }
}

impl Credentials {
    /// Reads a folder.
    ///
    /// # Errors
    /// If the folder has no authorities, neither a certificate nor a token, or unusable files.
    pub fn read(dir: &Path) -> Result<Credentials, Fault> {
        Credentials::read_with(dir, None)
    }

    /// Reads a folder, and a token at another path that replaces the folder's.
    ///
    /// # Errors
    /// As `read`, and if that token is unusable.
    pub fn read_with(dir: &Path, token: Option<&Path>) -> Result<Credentials, Fault> {
        // An absolute path is unchanged by a join to the folder.
        let absolute = |path| std::path::absolute(path).map_err(|error| files::wrong(dir, path, error));
        let token = token.map(absolute).transpose()?;
        let now = Arc::new(Mutex::new(Client::read(dir, token.as_deref())?));
        Ok(Credentials { dir: dir.into(), token, now })
    }

    /// Returns the token header of each call, if a token is used.
    pub fn bearer(&self) -> Option<HeaderValue> {
        self.lock().bearer.clone()
    }

    /// Returns the expiry of the folder's certificate. None if the folder has a token and no certificate.
    pub fn expires(&self) -> Option<SystemTime> {
        self.lock().expires
    }

    /// Performs the handshake with the server dialled as `host`.
    ///
    /// # Errors
    /// If the connection broke, or one end does not trust the other.
    pub async fn connect(&self, socket: TcpStream, host: &str) -> Result<Secured, DialError> {
        let shaken = async { Secured::new(self.shake(socket, host).await?.into(), None)?.greeted().await };
        shaken.await.map_err(|error| DialError::of_handshake(error, host))
    }

    /// Returns the expiry of the certificate of the server dialled as `host`. The connection is closed afterwards.
    ///
    /// # Errors
    /// As `connect`.
    pub async fn expiry_of(&self, socket: TcpStream, host: &str) -> Result<Option<SystemTime>, DialError> {
        let stream = self.shake(socket, host).await.map_err(|error| DialError::of_handshake(error, host))?;
        let chain = stream.get_ref().1.peer_certificates().unwrap_or_default();
        Ok(chain.first().and_then(files::expiry))
    }

    fn lock(&self) -> MutexGuard<'_, Client> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn shake(&self, socket: TcpStream, host: &str) -> io::Result<TlsStream<TcpStream>> {
        match Client::read(&self.dir, self.token.as_deref()) {
            Ok(newest) => *self.lock() = newest,
            // The files may be in the middle of a replacement, so the last read stays in use.
            Err(fault) => tracing::debug!(%fault, "the TLS folder is used as it was read before"),
        }
        let config = self.lock().config.clone();
        let wrong = |error| io::Error::new(io::ErrorKind::InvalidInput, format!("{host}: {error}"));
        let name = ServerName::try_from(host.to_string()).map_err(wrong)?;
        TlsConnector::from(config).connect(name, socket).await
    }
}

impl Client {
    fn read(dir: &Path, token: Option<&Path>) -> Result<Client, Fault> {
        let roots = files::authorities(dir, &files::read(dir, CA)?)?;
        let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_protocol_versions(&[&TLS13])
            .map_err(|error| files::wrong(dir, CA, error))?
            .with_root_certificates(roots);
        let certificate = files::read_optional(dir, CLIENT_CERTIFICATE)?;
        let (name, found) = match token {
            Some(path) => (path, Some(files::read(dir, path)?)),
            None => (Path::new(TOKEN), files::read_optional(dir, TOKEN)?),
        };
        let bearer = found.map(|token| bearer(dir, name, &token)).transpose()?;
        let mut expires = None;
        let mut config = match certificate {
            Some(certificate) => {
                let chain = files::shown(dir, CLIENT_CERTIFICATE, &certificate)?;
                expires = chain.first().and_then(files::expiry);
                let key = files::key(dir, CLIENT_KEY, &files::read(dir, CLIENT_KEY)?)?;
                let wrong =
                    |error| files::wrong(dir, CLIENT_CERTIFICATE, format!("not of {CLIENT_KEY}: {error}"));
                builder.with_client_auth_cert(chain, key).map_err(wrong)?
            }
            None if bearer.is_some() => builder.with_no_client_auth(),
            None => {
                let value = format!("{} without {CLIENT_CERTIFICATE} and without {TOKEN}", dir.display());
                let limit = "a folder with one of them";
                return Err(Fault::new(FaultKind::Precondition, "tls_dir", value, limit, files::REMEDY));
            }
        };
        config.alpn_protocols = vec![ALPN.to_vec()];
        config.resumption = rustls::client::Resumption::disabled();
        Ok(Client { config: Arc::new(config), bearer, expires })
    }
}

fn bearer(dir: &Path, name: &Path, token: &[u8]) -> Result<HeaderValue, Fault> {
    let wrong = || files::wrong(dir, name, "not one line of letters and digits");
    let token = std::str::from_utf8(token).map_err(|_| wrong())?.trim();
    if token.is_empty() || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(wrong());
    }
    let mut value = HeaderValue::try_from(format!("Bearer {token}")).map_err(|_| wrong())?;
    // Sensitive headers are not printed, and HTTP/2 stores them in no table.
    value.set_sensitive(true);
    Ok(value)
}
