//! Strangers over TLS, which stop at any stage of the handshake or complete it.

use std::{
    io::{self, Read, Write},
    net::TcpStream,
    sync::Arc,
};

use longshore_tests::{
    peer::Peer,
    tls::{Folders, identity},
};
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, StreamOwned,
    crypto::ring,
    pki_types::{CertificateDer, ServerName, pem::PemObject},
    version::TLS13,
};

/// A token, and its SHA-256. With a token listed, clients need no certificate, so strangers get through the
/// handshake.
pub(super) const TOKEN: &str = "foo";
const TOKEN_SHA256: &str = "2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae";

/// The stage at which a stranger stops.
#[derive(Clone, Copy, Debug)]
pub(super) enum Stop {
    /// Before the first byte.
    Silent,
    /// Within a hello.
    HalfHello,
    /// Within a hello as long as a record.
    LongHello,
    /// After the server's answer.
    Hello,
    Shaken,
    /// Within a record of the greatest length.
    HalfRecord,
}

/// A server's folders, and the strangers' credentials. Strangers may show the token of the identity `reader`; the
/// identity `worker` trains.
pub(super) struct Strangers {
    pub(super) folders: Folders,
    config: Arc<ClientConfig>,
}

impl Strangers {
    pub(super) fn new() -> Strangers {
        let identities = [
            identity("reader", &["reader"], &["*"], &[TOKEN_SHA256]),
            identity("worker", &["worker"], &["*"], &[]),
        ];
        let folders = Folders::new(&identities.concat());
        let authority = CertificateDer::from_pem_file(folders.server().join("ca.pem")).unwrap();
        let mut roots = RootCertStore::empty();
        roots.add(authority).unwrap();
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_protocol_versions(&[&TLS13])
            .unwrap();
        let mut config = config.with_root_certificates(roots).with_no_client_auth();
        config.alpn_protocols = vec![b"h2".to_vec()];
        Strangers { folders, config: Arc::new(config) }
    }

    /// Opens a connection on which nothing is sent yet. Returns the socket and the client's end of TLS.
    fn begin(&self, address: &str) -> io::Result<(TcpStream, ClientConnection)> {
        let socket = Peer::silent(address)?.socket;
        let host = ServerName::from(socket.peer_addr()?.ip());
        let end = ClientConnection::new(Arc::clone(&self.config), host).map_err(io::Error::other)?;
        Ok((socket, end))
    }

    /// Opens a connection with HTTP/2 behind TLS.
    pub(super) fn through(
        &self,
        address: &str,
    ) -> io::Result<Peer<StreamOwned<ClientConnection, TcpStream>>> {
        let (socket, end) = self.begin(address)?;
        Peer::over(StreamOwned::new(end, socket))
    }

    /// Opens a connection and stops at this stage.
    pub(super) fn come(&self, address: &str, stop: Stop) -> io::Result<Peer> {
        let (mut socket, mut end) = self.begin(address)?;
        let mut hello = Vec::new();
        end.write_tls(&mut hello)?;
        match stop {
            Stop::Silent => {}
            Stop::HalfHello => socket.write_all(&hello[..hello.len() / 2])?,
            Stop::LongHello => {
                socket.write_all(&[22, 3, 1, 0x40, 0, 1, 0, 0x3F, 0xFC])?;
                socket.write_all(&[0; 16_000])?;
            }
            Stop::Hello => {
                socket.write_all(&hello)?;
                // Part of the answer stays unread.
                socket.read_exact(&mut [0])?;
            }
            Stop::Shaken | Stop::HalfRecord => {
                socket.write_all(&hello)?;
                while end.is_handshaking() {
                    end.read_tls(&mut socket)?;
                    end.process_new_packets().map_err(io::Error::other)?;
                }
                while end.wants_write() {
                    end.write_tls(&mut socket)?;
                }
            }
        }
        if let Stop::HalfRecord = stop {
            socket.write_all(&[23, 3, 3, 0x41, 0])?;
            socket.write_all(&[0; 16_000])?;
        }
        Ok(Peer { socket })
    }
}
