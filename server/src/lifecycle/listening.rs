//! The addresses that a server listens on.

use std::{io, net::SocketAddr};

use tokio::net::TcpListener;

use super::error::ServerError;
use crate::{
    config::Config,
    members::Members,
    unix::{self, Local, SocketFile},
};

pub(super) struct Listening {
    /// Listener of TCP, with its bound address.
    pub(super) tcp: Option<(TcpListener, SocketAddr)>,
    /// Listener of the status page and metrics, with its bound address.
    pub(super) page: Option<(TcpListener, SocketAddr)>,
    pub(super) unix: Option<Local>,
    socket_file: Option<SocketFile>,
}

impl Listening {
    pub(super) async fn bind(config: &Config) -> Result<Listening, ServerError> {
        let tcp = match config.listen {
            Some(address) => {
                Some(listen(address).await.map_err(|source| ServerError::Bind { address, source })?)
            }
            None => None,
        };
        let page = match config.http {
            Some(address) => {
                Some(listen(address).await.map_err(|source| ServerError::BindHttp { address, source })?)
            }
            None => None,
        };
        let local = config.listen_unix.as_deref().map(|path| {
            let members = Members::of(config.unix_group.as_deref()).map_err(ServerError::UnixGroup)?;
            unix::listen_on(path, members)
                .map_err(|source| ServerError::BindUnix { path: path.into(), source })
        });
        let (unix, socket_file) = local.transpose()?.unzip();
        Ok(Listening { tcp, page, unix, socket_file })
    }

    pub(super) fn address(&self) -> Option<SocketAddr> {
        self.tcp.as_ref().map(|(_, address)| *address)
    }

    pub(super) fn http(&self) -> Option<SocketAddr> {
        self.page.as_ref().map(|(_, address)| *address)
    }

    /// Takes the socket file, which is removed on drop.
    pub(super) fn take_socket_file(&mut self) -> Option<SocketFile> {
        self.socket_file.take()
    }
}

async fn listen(address: SocketAddr) -> io::Result<(TcpListener, SocketAddr)> {
    let listener = TcpListener::bind(address).await?;
    let bound = listener.local_addr()?;
    Ok((listener, bound))
}
