//! TLS between client and server over TCP, with certificates from temporary folders.

use std::{fs, io, path::Path, sync::Arc};

use longshore_proto::limits::MOST_CHAIN_BYTES;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use rustls::{ClientConfig, crypto::ring, pki_types::ServerName, version::TLS13};
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};
use tokio_rustls::TlsConnector;

use super::{files, *};
use crate::direct::Socket;

const HOST: &str = "127.0.0.1";
const GREETING: &[u8; 8] = b"settings";

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

/// Returns a connection, and the server's end of it after the handshake and the greeting.
async fn serve(dir: &Path) -> (TcpStream, impl Future<Output = io::Result<Secured>>) {
    let listener = TcpListener::bind((HOST, 0)).await.unwrap();
    let socket = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let server = Server::read(dir, Certificates::Required).unwrap();
    let served = async move {
        let mut secured = server.accept(listener.accept().await?.0).await?;
        secured.write_all(GREETING).await?;
        secured.flush().await?;
        Ok(secured)
    };
    (socket, served)
}

#[tokio::test]
async fn ends_of_one_authority_reach_each_other() {
    let folder = folder("team-a");
    let (socket, served) = serve(folder.path()).await;
    let credentials = Credentials::read(folder.path()).unwrap();
    let (server, client) = tokio::join!(served, credentials.connect(socket, HOST));
    let (server, mut client) = (server.unwrap(), client.unwrap());
    assert_eq!(server.certificate().unwrap().name, "team-a");
    assert!(server.expires().is_some() && server.expires() == credentials.expires());
    assert!(client.certificate().is_none());
    let mut greeting = [0; GREETING.len()];
    client.read_exact(&mut greeting).await.unwrap();
    assert_eq!(&greeting, GREETING, "nothing is lost to the wait for it");
}

/// A client's handshake succeeds before the server has checked its certificate.
#[tokio::test]
async fn both_ends_say_why_they_refuse_the_other() {
    let (ours, theirs) = (folder("ours"), folder("theirs"));
    let refused = async || {
        let (socket, served) = serve(ours.path()).await;
        let credentials = Credentials::read(theirs.path()).unwrap();
        let (server, client) = tokio::join!(served, credentials.connect(socket, HOST));
        let DialError::Untrusted(untrusted) = client.unwrap_err() else { panic!("not of trust") };
        (server.unwrap_err().to_string(), untrusted.to_string())
    };
    let (server, client) = refused().await;
    assert!(server.contains("UnknownCA"), "{server}");
    assert!(client.contains("it is of an authority that ca.pem does not have"), "{client}");
    fs::copy(ours.path().join(CA), theirs.path().join(CA)).unwrap();
    let (server, client) = refused().await;
    assert!(server.contains("UnknownIssuer"), "{server}");
    assert!(client.contains("of an authority that it does not know"), "{client}");
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
