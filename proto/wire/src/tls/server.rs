//! A server's end.

use std::{io, path::Path, sync::Arc};

use longshore_proto::Fault;
use rustls::{
    ServerConfig,
    crypto::ring,
    pki_types::CertificateDer,
    server::{NoServerSessionStorage, WebPkiClientVerifier},
    version::TLS13,
};
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;

use super::{
    expiry,
    files::{self, CA, SERVER_CERTIFICATE, SERVER_KEY},
    secured::{ALPN, Secured, Shown},
};
/// Whether clients must show a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Certificates {
    Required,
    /// A client without one shows a token with its calls.
    Optional,
}

/// What a server shows, and what it asks of clients. A clone is cheap.
#[derive(Clone)]
pub struct Server {
    acceptor: TlsAcceptor,
}

impl Server {
    /// # Errors
    /// Where a file of the folder is missing or cannot be used.
    pub fn read(dir: &Path, certificates: Certificates) -> Result<Server, Fault> {
        let config = config(dir, certificates, ALPN)?;
        Ok(Server { acceptor: Arc::new(config).into() })
    }

    /// Shakes hands with a client. It has no deadline of its own.
    ///
    /// # Errors
    /// Where the client leaves, speaks otherwise, or shows a certificate that is not accepted.
    pub async fn accept(&self, socket: TcpStream) -> io::Result<Secured> {
        let stream = self.acceptor.accept(socket).await?;
        let shown = shown(stream.get_ref().1.peer_certificates().unwrap_or_default());
        Secured::new(stream.into(), shown)
    }
}

/// What a server of this folder shows, and what it asks of clients, for ends that speak one protocol (ALPN).
pub(super) fn config(dir: &Path, certificates: Certificates, protocol: &[u8]) -> Result<ServerConfig, Fault> {
    let provider = Arc::new(ring::default_provider());
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

pub(super) fn shown(chain: &[CertificateDer<'_>]) -> Option<Shown> {
    let first = chain.first()?;
    Some(Shown { name: name_of(first)?, expires: expiry::of(first) })
}

/// The first DNS name of a certificate, which names the identity that it proves; empty where it has none.
fn name_of(certificate: &CertificateDer<'_>) -> Option<Arc<str>> {
    let certificate = webpki::EndEntityCert::try_from(certificate).ok()?;
    Some(certificate.valid_dns_names().next().unwrap_or_default().into())
}
