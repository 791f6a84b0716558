//! TLS over TCP with clients unlike Longshore's, and certificates from temporary folders.

use std::{fs, io, path::Path, sync::Arc};

use longshore_proto::limits::MOST_CHAIN_BYTES;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use rustls::{ClientConfig, crypto::ring, pki_types::ServerName, version::TLS13};
use tempfile::TempDir;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsConnector;

use super::{files, *};

const HOST: &str = "127.0.0.1";

/// Creates a folder with a server's and a client's files, issued by an authority of this name.
fn folder(name: &str) -> TempDir {
    let folder = TempDir::new().unwrap();
    let write = |file: &str, text: String| fs::write(folder.path().join(file), text).unwrap();
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    write(CA, certificate_pem(params.self_signed(&key).unwrap().der()));
    let authority = Issuer::new(params, key);
    for (subject, certificate, file) in
        [(HOST, SERVER_CERTIFICATE, SERVER_KEY), (name, CLIENT_CERTIFICATE, CLIENT_KEY)]
    {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec![subject.to_string()]).unwrap();
        write(certificate, certificate_pem(params.signed_by(&key, &authority).unwrap().der()));
        write(file, key_pem(key.serialized_der()));
    }
    folder
}

/// Returns a connection, and the server's end of it after the handshake.
async fn serve(dir: &Path) -> (TcpStream, impl Future<Output = io::Result<Secured>>) {
    let listener = TcpListener::bind((HOST, 0)).await.unwrap();
    let socket = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let server = Server::read(dir, Certificates::Required).unwrap();
    (socket, async move { server.accept(listener.accept().await?.0).await })
}

#[tokio::test]
async fn clients_without_http_2_or_with_long_chains_are_refused() {
    let folder = folder("team-a");
    let dir = folder.path();
    let read = |file: &str| files::read(dir, file).unwrap();
    for (protocol, more, why) in [
        (&b"http/1.1"[..], 0, "NoApplicationProtocol"),
        (b"", 0, "ALPN h2"),
        (b"h2", 1000, ""),
        (b"h2", MOST_CHAIN_BYTES, "CertificatePayloadTooLarge"),
    ] {
        let mut chain = files::shown(dir, CLIENT_CERTIFICATE, &read(CLIENT_CERTIFICATE)).unwrap();
        chain.extend((more > 0).then(|| vec![0; more].into()));
        let mut config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_protocol_versions(&[&TLS13])
            .unwrap()
            .with_root_certificates(files::authorities(dir, &read(CA)).unwrap())
            .with_client_auth_cert(chain, files::key(dir, CLIENT_KEY, &read(CLIENT_KEY)).unwrap())
            .unwrap();
        config.alpn_protocols.extend((!protocol.is_empty()).then(|| protocol.to_vec()));
        let (socket, served) = serve(dir).await;
        let client =
            TlsConnector::from(Arc::new(config)).connect(ServerName::try_from(HOST).unwrap(), socket);
        let (server, _client) = tokio::join!(served, client);
        let found = server.err().map(|error| format!("{error:?}")).unwrap_or_default();
        assert!(found.contains(why) && found.is_empty() == why.is_empty(), "{why}: {found}");
    }
}
