//! TLS below HTTP/1.1, for readers of a server's pages: browsers and Prometheus. Their certificate is optional.

use std::{io, path::Path, sync::Arc};

use longshore_proto::Fault;
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, server::TlsStream};

use super::server::{self, Certificates};
use crate::direct::Certificate;

const ALPN: &[u8] = b"http/1.1";

/// TLS configuration of a server's pages. A clone is cheap.
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
        let config = server::config(dir, Certificates::Optional, ALPN)?;
        Ok(Pages { acceptor: Arc::new(config).into() })
    }

    /// Performs the handshake with a reader, without a deadline.
    ///
    /// # Errors
    /// If the reader disconnects, does not speak TLS, or shows a certificate that is not accepted.
    pub async fn accept(&self, socket: TcpStream) -> io::Result<Reader> {
        let socket = self.acceptor.accept(socket).await?;
        let chain = socket.get_ref().1.peer_certificates().unwrap_or_default();
        let certificate = server::shown(chain).map(|shown| shown.certificate);
        Ok(Reader { socket, certificate })
    }
}
