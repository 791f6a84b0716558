//! The record layer against rustls' own, and against ends that send what they must not.

mod both_ways;
mod ends;
mod wrong;

use std::{
    io::{self, IoSliceMut},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use rustls::{
    ClientConfig, RootCertStore, ServerConfig,
    client::UnbufferedClientConnection,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName},
    server::{UnbufferedServerConnection, WebPkiClientVerifier},
    version::TLS13,
};
use tokio::io::{AsyncRead, AsyncWrite, DuplexStream, ReadBuf, duplex};

use super::{
    handshake::{Shaken, shake},
    stream::Stream,
};
use crate::direct::Socket;

/// Far beyond what any of these takes.
const PATIENCE: Duration = Duration::from_secs(60);
const HOST: &str = "server.example";

/// A pipe's end that gives and takes at most so many bytes with each call, by turns; 0 makes it say that it cannot just now.
struct Cut {
    pipe: DuplexStream,
    cuts: Vec<usize>,
    reads: usize,
    writes: usize,
}

impl Cut {
    fn new(pipe: DuplexStream, cuts: &[usize]) -> Cut {
        Cut { pipe, cuts: cuts.to_vec(), reads: 0, writes: 0 }
    }
}

impl Socket for Cut {}

impl AsyncRead for Cut {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        this.reads += 1;
        let most = this.cuts[this.reads % this.cuts.len()].min(out.remaining());
        if most == 0 {
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        let mut bytes = vec![0; most];
        let mut part = ReadBuf::new(&mut bytes);
        ready!(Pin::new(&mut this.pipe).poll_read(context, &mut part))?;
        out.put_slice(part.filled());
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Cut {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        this.writes += 1;
        let most = this.cuts[this.writes % this.cuts.len()].min(bytes.len());
        if most == 0 {
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        Pin::new(&mut this.pipe).poll_write(context, &bytes[..most])
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().pipe).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().pipe).poll_shutdown(context)
    }
}

/// Both ends' configurations, with one authority. The server asks for a certificate.
struct Configs {
    client: ClientConfig,
    server: ServerConfig,
}

impl Configs {
    fn new() -> Configs {
        Configs::with_more(0)
    }

    /// The client shows so many bytes behind its own certificate.
    fn with_more(bytes: usize) -> Configs {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let (authority, certificate) = {
            let key = KeyPair::generate().unwrap();
            let mut params = CertificateParams::new(Vec::new()).unwrap();
            // With one name, what either of two authorities has signed would be taken for forged of the other.
            let name = format!("authority {}", NEXT.fetch_add(1, Ordering::Relaxed));
            params.distinguished_name.push(DnType::CommonName, name);
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            let certificate = params.self_signed(&key).unwrap().der().clone();
            (Issuer::new(params, key), certificate)
        };
        let signed = || {
            let key = KeyPair::generate().unwrap();
            let params = CertificateParams::new(vec![HOST.to_string()]).unwrap();
            let chain: Vec<CertificateDer<'static>> =
                vec![params.signed_by(&key, &authority).unwrap().der().clone()];
            (chain, PrivateKeyDer::try_from(key.serialize_der()).unwrap())
        };
        let mut roots = RootCertStore::empty();
        roots.add(certificate).unwrap();
        let roots = Arc::new(roots);
        let provider = Arc::new(ring::default_provider());
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider));
        let (chain, key) = signed();
        let mut server = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&[&TLS13])
            .unwrap()
            .with_client_cert_verifier(verifier.build().unwrap())
            .with_single_cert(chain, key)
            .unwrap();
        let (mut chain, key) = signed();
        chain.extend((bytes > 0).then(|| vec![0; bytes].into()));
        let mut client = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .unwrap()
            .with_root_certificates(roots)
            .with_client_auth_cert(chain, key)
            .unwrap();
        client.alpn_protocols = vec![b"h2".to_vec()];
        server.alpn_protocols = vec![b"h2".to_vec()];
        client.enable_secret_extraction = true;
        server.enable_secret_extraction = true;
        Configs { client, server }
    }

    fn client_end(&self) -> UnbufferedClientConnection {
        UnbufferedClientConnection::new(Arc::new(self.client.clone()), name()).unwrap()
    }

    fn server_end(&self) -> UnbufferedServerConnection {
        UnbufferedServerConnection::new(Arc::new(self.server.clone())).unwrap()
    }

    /// Both of this crate's ends, over a pipe, the server's socket cut so.
    async fn pair(&self, cuts: &[usize]) -> (Stream<Cut>, Stream<Cut>) {
        let (near, far) = duplex(256 * 1024);
        let client = shake(self.client_end(), Cut::new(near, &[usize::MAX]));
        let server = shake(self.server_end(), Cut::new(far, cuts));
        let (client, server) = tokio::join!(client, server);
        let [client, server] = [client, server].map(checked);
        (client, server)
    }
}

fn name() -> ServerName<'static> {
    ServerName::try_from(HOST).unwrap()
}

/// What a handshake must have come to.
fn checked(shaken: io::Result<Shaken<Cut>>) -> Stream<Cut> {
    let shaken = shaken.unwrap();
    assert_eq!(shaken.protocol.as_deref(), Some(&b"h2"[..]));
    assert_eq!(shaken.chain.len(), 1);
    shaken.stream
}

/// Some bytes, no two parts of which are alike.
fn noise(bytes: usize) -> Vec<u8> {
    let mut state = 1_u64;
    let next = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 56) as u8
    };
    (0..bytes).map(next).collect()
}

/// Reads to two places at once.
async fn read_into(stream: &mut Stream<Cut>, near: &mut [u8], far: &mut [u8]) -> io::Result<usize> {
    let mut places = [IoSliceMut::new(near), IoSliceMut::new(far)];
    std::future::poll_fn(|context| stream.poll_read_into(context, &mut places)).await
}

/// Takes what lies in the pipe.
async fn drain(stream: &mut Stream<Cut>) -> Vec<u8> {
    let mut sealed = vec![0; 256 * 1024];
    let mut part = ReadBuf::new(&mut sealed);
    let pipe = &mut stream.socket().pipe;
    let one = std::future::poll_fn(|context| {
        let _ = Pin::new(&mut *pipe).poll_read(context, &mut part);
        Poll::Ready(())
    });
    one.await;
    let bytes = part.filled().len();
    sealed.truncate(bytes);
    sealed
}
