//! The addresses that a server listens on.

use std::net::SocketAddr;

use tokio::net::TcpListener;

use super::error::ServerError;
use crate::{
    config::Config,
    members::Members,
    unix::{self, Local, SocketFile},
};

pub(super) struct Listening {
    pub(super) tcp: TcpListener,
    pub(super) address: SocketAddr,
    /// Listener of the status page and metrics, with its bound address.
    pub(super) page: Option<(TcpListener, SocketAddr)>,
    pub(super) unix: Option<Local>,
    socket_file: Option<SocketFile>,
}

impl Listening {
    pub(super) async fn bind(config: &Config) -> Result<Listening, ServerError> {
        let bind = |source| ServerError::Bind { address: config.listen, source };
        let tcp = TcpListener::bind(config.listen).await.map_err(bind)?;
        let address = tcp.local_addr().map_err(bind)?;
        let page = match config.http {
            Some(address) => Some(listen_http(address).await?),
            None => None,
        };
        let local = config.listen_unix.as_deref().map(|path| {
            let members = Members::of(config.unix_group.as_deref()).map_err(ServerError::UnixGroup)?;
            unix::listen_on(path, members)
                .map_err(|source| ServerError::BindUnix { path: path.into(), source })
        });
        let (unix, socket_file) = local.transpose()?.unzip();
        Ok(Listening { tcp, address, page, unix, socket_file })
    }

    pub(super) fn http(&self) -> Option<SocketAddr> {
        self.page.as_ref().map(|(_, address)| *address)
    }

    /// Takes the socket file, which is removed on drop.
    pub(super) fn take_socket_file(&mut self) -> Option<SocketFile> {
        self.socket_file.take()
    }
}

async fn listen_http(address: SocketAddr) -> Result<(TcpListener, SocketAddr), ServerError> {
    let bind = |source| ServerError::BindHttp { address, source };
    let listener = TcpListener::bind(address).await.map_err(bind)?;
    let bound = listener.local_addr().map_err(bind)?;
    Ok((listener, bound))
}
