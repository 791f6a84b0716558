//! TLS below HTTP/1.1, for readers of a server's pages: browsers and Prometheus, which may show a certificate and need not.

use std::{io, path::Path, sync::Arc};

use longshore_proto::Fault;
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, server::TlsStream};

use super::server::{self, Certificates};

const ALPN: &[u8] = b"http/1.1";

/// The certificate of a server, for its readers. A clone is cheap.
#[derive(Clone)]
pub struct Pages {
    acceptor: TlsAcceptor,
}

/// A reader that has shaken hands.
pub struct Reader {
    pub socket: TlsStream<TcpStream>,
    /// The name on its certificate: the first DNS name, or nothing.
    pub certificate: Option<Arc<str>>,
}

impl Pages {
    /// # Errors
    /// Where a file of the folder is missing or cannot be used.
    pub fn read(dir: &Path) -> Result<Pages, Fault> {
        let config = server::config(dir, Certificates::Optional, ALPN)?;
        Ok(Pages { acceptor: Arc::new(config).into() })
    }

    /// Shakes hands with a reader. It has no deadline of its own.
    ///
    /// # Errors
    /// Where the reader leaves, speaks otherwise, or shows a certificate that is not accepted.
    pub async fn accept(&self, socket: TcpStream) -> io::Result<Reader> {
        let socket = self.acceptor.accept(socket).await?;
        let chain = socket.get_ref().1.peer_certificates().unwrap_or_default();
        let certificate = server::shown(chain).map(|shown| shown.name);
        Ok(Reader { socket, certificate })
    }
}
