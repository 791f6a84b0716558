//! A server in this process, on TCP and on a Unix socket.

use std::{
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
};

use longshore_server::{Config, Server};
use longshore_worker::session::Transport;
use tempfile::TempDir;
use tokio::runtime::Runtime;

/// Fields drop in this order.
pub(super) struct Host {
    server: Server,
    _runtime: Runtime,
    folder: TempDir,
}

impl Host {
    /// Starts a server with a temporary folder, which `configure` may fill.
    pub(super) fn start(
        configure: impl FnOnce(&Path, Config) -> anyhow::Result<Config>,
    ) -> anyhow::Result<Host> {
        let folder = tempfile::tempdir()?;
        let defaults = Config::default_on(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
        let defaults = Config { listen_unix: Some(socket(&folder)), ..defaults };
        let config = configure(folder.path(), defaults)?;
        let runtime = longshore_server::runtime("server")?;
        let server = runtime.block_on(Server::start(config))?;
        Ok(Host { server, _runtime: runtime, folder })
    }

    pub(super) fn address(&self, transport: Transport) -> String {
        match transport {
            Transport::Unix => format!("unix:{}", socket(&self.folder).display()),
            _ => self.server.address().to_string(),
        }
    }

    pub(super) fn folder(&self) -> &Path {
        self.folder.path()
    }
}

fn socket(folder: &TempDir) -> PathBuf {
    folder.path().join("bench.sock")
}
