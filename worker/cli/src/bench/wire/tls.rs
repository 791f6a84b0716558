//! TLS in the bench: a certificate authority of its own, and bare rustls streams over a pair of sockets.

use std::{
    net::TcpStream,
    path::{Path, PathBuf},
    sync::Arc,
    thread,
};

use longshore_wire::tls::{CA, SERVER_CERTIFICATE, SERVER_KEY};
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, ServerConfig, ServerConnection, StreamOwned,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject},
    version::TLS13,
};
use tempfile::TempDir;

use crate::tls::{Authority, Subject, write_identities};

const HOST: &str = "127.0.0.1";
const WORKER: &str = "bench";

/// TLS folders of a server and of a worker. Dropping the value removes them.
pub(super) struct Folders(TempDir);

impl Folders {
    pub(super) fn make() -> anyhow::Result<Folders> {
        let folders = Folders(tempfile::tempdir()?);
        let authority = Authority::create(&folders.0.path().join("authority"))?;
        authority.issue(&folders.server(), &Subject::Server(&[HOST.to_string()]), 1)?;
        authority.issue(&folders.worker(), &Subject::Client(WORKER), 1)?;
        let identities = format!("[[identity]]\nname = {WORKER:?}\nroles = [\"worker\"]\njobs = [\"*\"]\n");
        write_identities(&folders.server(), &identities)?;
        Ok(folders)
    }

    pub(super) fn server(&self) -> PathBuf {
        self.0.path().join("server")
    }

    pub(super) fn worker(&self) -> PathBuf {
        self.0.path().join("worker")
    }
}

type Client = StreamOwned<ClientConnection, TcpStream>;
type Server = StreamOwned<ServerConnection, TcpStream>;

/// Completes a handshake over a pair of sockets.
pub(super) fn pair(folder: &Path, (near, far): (TcpStream, TcpStream)) -> anyhow::Result<(Client, Server)> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(folder.join(CA))?)?;
    let chain = vec![CertificateDer::from_pem_file(folder.join(SERVER_CERTIFICATE))?];
    let key = PrivateKeyDer::from_pem_file(folder.join(SERVER_KEY))?;
    let provider = Arc::new(ring::default_provider());
    let server = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&[&TLS13])?
        .with_no_client_auth()
        .with_single_cert(chain, key)?;
    let client = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])?
        .with_root_certificates(roots)
        .with_no_client_auth();
    let client = ClientConnection::new(Arc::new(client), ServerName::try_from(HOST)?)?;
    let mut client = StreamOwned::new(client, near);
    let mut server = StreamOwned::new(ServerConnection::new(Arc::new(server))?, far);
    thread::scope(|scope| {
        let shaking = scope.spawn(|| server.conn.complete_io(&mut server.sock));
        client.conn.complete_io(&mut client.sock)?;
        shaking.join().expect("a handshake does not panic")
    })?;
    Ok((client, server))
}
