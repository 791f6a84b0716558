//! TLS in the bench: a certificate authority of its own, and bare rustls streams over a pair of sockets.

use std::{fs, net::TcpStream, path::Path, sync::Arc, thread};

use longshore_wire::tls::{CA, SERVER_CERTIFICATE, SERVER_KEY};
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, ServerConfig, ServerConnection, StreamOwned,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject},
    version::TLS13,
};

use crate::tls::{Authority, Subject, write_identities};

const HOST: &str = "127.0.0.1";
const IDENTITY: &str = "bench";
/// Folders of a server and of a worker.
pub(super) const SERVER: &str = "server";
pub(super) const WORKER: &str = "worker";

/// Makes the folders of a server and of a worker, with certificates of a new authority.
pub(super) fn make(dir: &Path) -> anyhow::Result<()> {
    let authority = dir.join("authority");
    fs::create_dir(&authority)?;
    let authority = Authority::create(&authority)?;
    authority.issue(&dir.join(SERVER), &Subject::Server(&[HOST.to_string()]), 1)?;
    authority.issue(&dir.join(WORKER), &Subject::Client(IDENTITY), 1)?;
    let identities = format!("[[identity]]\nname = {IDENTITY:?}\nroles = [\"worker\"]\njobs = [\"*\"]\n");
    write_identities(&dir.join(SERVER), &identities)
}

type Client = StreamOwned<ClientConnection, TcpStream>;
type Server = StreamOwned<ServerConnection, TcpStream>;

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
