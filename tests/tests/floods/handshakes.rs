//! Strangers that stop within TLS: at each stage of the handshake, and with half a record behind it.

use std::{
    io::{self, Read, Write},
    sync::Arc,
};

use longshore_proto::limits::{HANDSHAKE_BYTES, MAX_HANDSHAKES, STRANGERS_TLS_BYTES};
use longshore_tests::{
    peer::Peer,
    server::{Longshored, ServerOptions},
    soak,
    tls::{Folders, identity},
};
use rustls::{
    ClientConfig, ClientConnection, RootCertStore,
    crypto::ring,
    pki_types::{CertificateDer, ServerName, pem::PemObject},
    version::TLS13,
};

use super::{growth, mib};

/// A token's SHA-256. Beside it a client need not show a certificate, so that strangers get through the handshake.
const TOKEN: &str = "2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae";

#[derive(Clone, Copy, Debug)]
enum Stop {
    /// Before the first byte.
    Silent,
    /// Within a hello.
    HalfHello,
    /// Within a hello of a record's length.
    LongHello,
    /// When the server has answered.
    Hello,
    Shaken,
    /// Within the longest record that may come.
    HalfRecord,
}

struct Strangers {
    folders: Folders,
    config: Arc<ClientConfig>,
}

impl Strangers {
    fn new() -> Strangers {
        let folders = Folders::new(&identity("reader", &["reader"], &["*"], &[TOKEN]));
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

    fn come(&self, server: &Longshored, stop: Stop) -> io::Result<Peer> {
        let mut peer = Peer::silent(server.address())?;
        let host = ServerName::from(peer.socket.peer_addr()?.ip());
        let mut end = ClientConnection::new(Arc::clone(&self.config), host).map_err(io::Error::other)?;
        let mut hello = Vec::new();
        end.write_tls(&mut hello)?;
        match stop {
            Stop::Silent => {}
            Stop::HalfHello => peer.socket.write_all(&hello[..hello.len() / 2])?,
            Stop::LongHello => {
                peer.socket.write_all(&[22, 3, 1, 0x40, 0, 1, 0, 0x3F, 0xFC])?;
                peer.socket.write_all(&[0; 16_000])?;
            }
            Stop::Hello => {
                peer.socket.write_all(&hello)?;
                // Not all of the answer is taken.
                peer.socket.read_exact(&mut [0])?;
            }
            Stop::Shaken | Stop::HalfRecord => {
                peer.socket.write_all(&hello)?;
                while end.is_handshaking() {
                    end.read_tls(&mut peer.socket)?;
                    end.process_new_packets().map_err(io::Error::other)?;
                }
                while end.wants_write() {
                    end.write_tls(&mut peer.socket)?;
                }
            }
        }
        if let Stop::HalfRecord = stop {
            peer.socket.write_all(&[23, 3, 3, 0x41, 0])?;
            peer.socket.write_all(&[0; 16_000])?;
        }
        Ok(peer)
    }
}

#[test]
fn who_stops_within_tls_makes_a_server_hold_what_is_counted() {
    let strangers = Strangers::new();
    for stop in [Stop::Silent, Stop::HalfHello, Stop::LongHello, Stop::Hello, Stop::Shaken, Stop::HalfRecord]
    {
        let full = "all connections are taken";
        let server = ServerOptions::new().tls(&strangers.folders.server()).allow(full).start();
        let mut came = Vec::new();
        eprint!("{stop:?}: ");
        let (most, _) = growth(&server, || {
            // Some are ended for others before they have come so far.
            came.extend((0..soak::pick(300, 2000)).filter_map(|_| strangers.come(&server, stop).ok()));
        });
        assert!(came.len() > soak::pick(150, 1000), "{} came", came.len());
        let counted = match stop {
            Stop::Shaken | Stop::HalfRecord => STRANGERS_TLS_BYTES,
            _ => MAX_HANDSHAKES * HANDSHAKE_BYTES,
        };
        assert!(most < counted as u64, "{stop:?}: {} MiB", mib(most));
    }
}
