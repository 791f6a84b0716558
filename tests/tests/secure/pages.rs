//! The HTTP address over TLS. Identities with all jobs read it by a certificate or a token; other callers
//! learn no job's name.

use std::{
    io::{Read, Write},
    net::TcpStream,
    path::Path,
    sync::Arc,
};

use longshore_tests::{
    conformance::cluster::eventually,
    http::{self, FLAGS},
    process::DEADLINE,
    server::ServerOptions,
    tls::{Authority, Folders, Life, identity},
};
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, StreamOwned,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject},
    version::TLS13,
};

use super::{TOKEN_SHA256, train};

/// Status code, head and body of an answer.
type Answer = (u16, String, String);

/// A reader's credentials.
#[derive(Default)]
struct Shown<'a> {
    certificate: Option<&'a Path>,
    authorization: Option<&'a str>,
}

/// Sends a browser's request. Fails if the handshake fails or the server closes the connection. The
/// certificate must name `host`.
fn get(
    (host, address): (&str, &str),
    authority: &Path,
    shown: &Shown<'_>,
    path: &str,
) -> std::io::Result<Answer> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(authority.join("ca.pem")).unwrap()).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(&[&TLS13])
        .unwrap()
        .with_root_certificates(roots);
    let mut config = match shown.certificate {
        Some(dir) => {
            let certificate = CertificateDer::from_pem_file(dir.join("client.pem")).unwrap();
            let key = PrivateKeyDer::from_pem_file(dir.join("client.key")).unwrap();
            config.with_client_auth_cert(vec![certificate], key).unwrap()
        }
        None => config.with_no_client_auth(),
    };
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    let socket = TcpStream::connect(address)?;
    socket.set_read_timeout(Some(DEADLINE))?;
    let host = ServerName::try_from(host.to_string()).map_err(std::io::Error::other)?;
    let end = ClientConnection::new(Arc::new(config), host).map_err(std::io::Error::other)?;
    let mut stream = StreamOwned::new(end, socket);
    let authorization =
        shown.authorization.map(|value| format!("Authorization: {value}\r\n")).unwrap_or_default();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {address}\r\n{authorization}Connection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(http::parts(&answer))
}

#[test]
fn pages_over_tls_are_for_identities_with_all_jobs() {
    let identities = [
        identity("worker", &["worker"], &["*"], &[]),
        identity("some", &["operator"], &["run-*"], &[]),
        identity("dashboard", &["reader"], &["*"], &[TOKEN_SHA256]),
    ];
    let folders = Folders::new(&identities.concat());
    let (worker, some) = (folders.client("worker"), folders.client("some"));
    let options = ServerOptions::new().tls(&folders.server()).args(FLAGS).args(["--http-tls"]);
    let server = options.start();
    let address = http::address(&server);
    train(4, &server, &worker).args(["--job", "run-1"]).run();

    // The pages have another address of this host than the certificate names.
    let (host, _) = server.address().rsplit_once(':').unwrap();
    let ask = |shown: &Shown<'_>, path: &str| get((host, &address), &worker, shown, path);
    let certificate = |dir| Shown { certificate: Some(dir), ..Shown::default() };
    let authorization = |value| Shown { authorization: Some(value), ..Shown::default() };
    // "anybody:foo" in base64.
    let readers =
        [certificate(&worker), authorization("Bearer foo"), authorization("Basic YW55Ym9keTpmb28=")];
    for shown in &readers {
        let (code, _, body) = ask(shown, "/status.json").unwrap();
        assert!(code == 200 && body.contains("run-1"), "{code} {body}");
        let (code, _, body) = ask(shown, "/metrics").unwrap();
        assert!(code == 200 && body.contains("run-1"), "{code} {body}");
        assert_eq!(ask(shown, "/").unwrap().0, 200);
    }
    let wrong = authorization("Bearer bar");
    let others = [(Shown::default(), 401), (wrong, 401), (certificate(&some), 403)];
    for (shown, expected) in &others {
        for path in ["/", "/metrics", "/status.json", "/page.js", "/nowhere"] {
            let (code, head, body) = ask(shown, path).unwrap();
            assert!(code == *expected && !body.contains("run-1"), "{path}: {code} {body}");
            assert_eq!(head.contains("www-authenticate: basic"), code == 401, "{head}");
        }
        // Kubernetes' probes have no credentials.
        assert_eq!(ask(shown, "/healthz").unwrap().0, 200);
        assert_eq!(ask(shown, "/readyz").unwrap().0, 200);
    }
    let (code, _, body) = http::get(&address, "/healthz");
    assert!(code == 400 && body.contains("https://"), "{code} {body}");
    // A certificate of another authority, and an expired one.
    let stranger = folders.dir("stranger");
    Authority::new().write_client(&stranger, "worker", Life::Valid);
    let expired = folders.dir("expired");
    folders.authority.write_client(&expired, "worker", Life::Expired);
    for dir in [&stranger, &expired] {
        assert!(ask(&certificate(dir), "/healthz").is_err());
    }
    // The token is revoked.
    folders.list(&identities[..2].concat());
    let gone = || (ask(&readers[1], "/metrics").unwrap().0 == 401).then_some(());
    eventually("the token to be taken back", gone);
    assert_eq!(ask(&certificate(&worker), "/metrics").unwrap().0, 200);
}
