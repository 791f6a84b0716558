//! TLS configurations and handshakes of a server: below HTTP/2, and below HTTP/1.1 for its pages.

use std::{io, path::Path, sync::Arc, time::SystemTime};

use longshore_proto::Fault;
use ring::digest::{SHA256, digest};
use rustls::{
    ServerConfig, crypto,
    pki_types::CertificateDer,
    server::{NoServerSessionStorage, WebPkiClientVerifier},
    version::TLS13,
};
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, server::TlsStream};

use super::{
    files::{self, CA, SERVER_CERTIFICATE, SERVER_KEY},
    secured::{ALPN, Secured, Shown},
};
use crate::direct::Certificate;

/// ALPN name of the pages' protocol.
const PAGES_ALPN: &[u8] = b"http/1.1";

/// Requirement of a client's certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Certificates {
    Required,
    /// A client without a certificate shows a token with its calls.
    Optional,
}

/// TLS configuration of a server. A clone is cheap.
#[derive(Clone)]
pub struct Server {
    acceptor: TlsAcceptor,
}

impl Server {
    /// Reads the folder.
    ///
    /// # Errors
    /// If a file of the folder is missing or unusable.
    pub fn read(dir: &Path, certificates: Certificates) -> Result<Server, Fault> {
        let config = config(dir, certificates, ALPN)?;
        Ok(Server { acceptor: Arc::new(config).into() })
    }

    /// Performs the handshake with a client, without a deadline.
    ///
    /// # Errors
    /// If the client disconnects, does not speak TLS, or shows a certificate that is not accepted.
    pub async fn accept(&self, socket: TcpStream) -> io::Result<Secured> {
        let stream = self.acceptor.accept(socket).await?;
        let shown = shown(stream.get_ref().1.peer_certificates().unwrap_or_default());
        Secured::new(stream.into(), shown)
    }
}

/// TLS configuration of a server's pages, for browsers and Prometheus. Their certificate is optional. A clone is cheap.
#[derive(Clone)]
pub struct Pages {
    acceptor: TlsAcceptor,
}

/// A reader after the handshake.
pub struct Reader {
    pub socket: TlsStream<TcpStream>,
    pub certificate: Option<Arc<Certificate>>,
}

impl Pages {
    /// Reads the folder.
    ///
    /// # Errors
    /// If a file of the folder is missing or unusable.
    pub fn read(dir: &Path) -> Result<Pages, Fault> {
        let config = config(dir, Certificates::Optional, PAGES_ALPN)?;
        Ok(Pages { acceptor: Arc::new(config).into() })
    }

    /// Performs the handshake with a reader, without a deadline.
    ///
    /// # Errors
    /// If the reader disconnects, does not speak TLS, or shows a certificate that is not accepted.
    pub async fn accept(&self, socket: TcpStream) -> io::Result<Reader> {
        let socket = self.acceptor.accept(socket).await?;
        let chain = socket.get_ref().1.peer_certificates().unwrap_or_default();
        let certificate = shown(chain).map(|shown| shown.certificate);
        Ok(Reader { socket, certificate })
    }
}

/// Returns a server's TLS configuration from the folder, for the protocol `protocol` (ALPN).
fn config(dir: &Path, certificates: Certificates, protocol: &[u8]) -> Result<ServerConfig, Fault> {
    let provider = Arc::new(crypto::ring::default_provider());
    let roots = files::authorities(dir, &files::read(dir, CA)?)?;
    let verifier = WebPkiClientVerifier::builder_with_provider(roots.into(), Arc::clone(&provider));
    let verifier = match certificates {
        Certificates::Required => verifier,
        Certificates::Optional => verifier.allow_unauthenticated(),
    };
    let verifier = verifier.build().map_err(|error| files::wrong(dir, CA, error))?;
    let chain = files::shown(dir, SERVER_CERTIFICATE, &files::read(dir, SERVER_CERTIFICATE)?)?;
    let key = files::key(dir, SERVER_KEY, &files::read(dir, SERVER_KEY)?)?;
    let wrong = |error| files::wrong(dir, SERVER_CERTIFICATE, format!("not of {SERVER_KEY}: {error}"));
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])
        .map_err(|error| files::wrong(dir, CA, error))?
        .with_client_cert_verifier(verifier)
        .with_single_cert(chain, key)
        .map_err(wrong)?;
    config.alpn_protocols = vec![protocol.to_vec()];
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(config)
}

fn shown(chain: &[CertificateDer<'_>]) -> Option<Shown> {
    let first = chain.first()?;
    let parsed = webpki::EndEntityCert::try_from(first).ok()?;
    let mut sha256 = [0; 32];
    sha256.copy_from_slice(digest(&SHA256, first).as_ref());
    let certificate =
        Certificate { name: parsed.valid_dns_names().next().unwrap_or_default().into(), sha256 };
    Some(Shown { certificate: certificate.into(), expires: files::expiry(first) })
}

/// Returns the earliest expiry among a file's certificates. None if no certificate can be read.
pub fn first_expiry(dir: &Path, file: &str) -> Option<SystemTime> {
    files::chain(dir, file, &files::read(dir, file).ok()?).ok()?.iter().filter_map(files::expiry).min()
}
