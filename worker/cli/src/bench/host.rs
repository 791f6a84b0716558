//! The servers of a bench: in this process, on TCP and on a Unix socket, or elsewhere.

use std::{
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
};

use anyhow::Context;
use longshore_proto::JobSpec;
use longshore_server::{Config, Server, config::StorageConfig};
use longshore_wire::v1;
use longshore_worker::session::Transport;
use tempfile::TempDir;
use tokio::runtime::Runtime;

use super::step::Args;
use crate::{access::Access, servers::Servers};

/// A server in this process. Fields drop in this order: the server ends before its runtime and its folder.
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

/// The server of a bench in this process, or servers elsewhere.
pub(super) struct Hosts {
    pub(super) addresses: Vec<String>,
    pub(super) access: Access,
    own: Option<Host>,
}

impl Hosts {
    pub(super) fn start(args: &Args) -> anyhow::Result<Hosts> {
        if !args.servers.is_empty() {
            return Ok(Hosts { addresses: args.servers.clone(), access: args.access.clone(), own: None });
        }
        let (state_dirs, spill) = (args.state_dir.clone(), args.spill);
        let storage = StorageConfig { state_dirs, spill, ..StorageConfig::default() };
        let own = Host::start(|_, defaults| Ok(Config { storage, ..defaults }))?;
        // A server of this process gets no credentials, whatever the environment says.
        let (addresses, access) = (vec![own.address(args.transport())], Access::default());
        Ok(Hosts { addresses, access, own: Some(own) })
    }

    /// Returns the most bytes of memory that a server has reserved for the job.
    pub(super) fn reserved(&self, spec: &JobSpec) -> anyhow::Result<u64> {
        let described = Servers::connect(&self.addresses, &self.access)?.described(spec.name.as_str())?;
        Ok(described.iter().map(|job| job.memory_bytes).max().unwrap_or(0))
    }

    pub(super) fn clear(&self, spec: &JobSpec) -> anyhow::Result<()> {
        if self.own.is_some() {
            return Ok(());
        }
        let request = v1::DeleteJobRequest { job: spec.name.to_string(), discard_unreadable: false };
        let servers = Servers::connect(&self.addresses, &self.access)?;
        let deleted = servers.each(async |mut admin| admin.delete_job(request.clone()).await);
        deleted.map(drop).context("deleting the bench's job")
    }
}
