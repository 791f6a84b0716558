//! The servers of a bench: a server in this process, or servers elsewhere.

use std::net::{Ipv4Addr, SocketAddr};

use anyhow::Context;
use longshore_proto::JobSpec;
use longshore_server::{Config, Server, config::StorageConfig};
use longshore_wire::v1;
use longshore_worker::session::Transport;
use tokio::runtime::Runtime;

use super::Args;
use crate::{access::Access, servers::Servers};

pub(super) struct Hosts {
    addresses: Vec<String>,
    access: Access,
    own: Option<Own>,
}

/// A server in this process. Fields drop in this order.
struct Own {
    _server: Server,
    _runtime: Runtime,
    _folder: tempfile::TempDir,
}

impl Hosts {
    pub(super) fn start(args: &Args) -> anyhow::Result<Hosts> {
        if !args.servers.is_empty() {
            return Ok(Hosts { addresses: args.servers.clone(), access: args.access.clone(), own: None });
        }
        let folder = tempfile::tempdir()?;
        let socket = folder.path().join("bench.sock");
        let defaults = Config::default_on(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
        let storage = StorageConfig {
            state_dirs: args.state_dir.clone(),
            spill: args.spill,
            ..StorageConfig::default()
        };
        let config = Config { listen_unix: Some(socket.clone()), storage, ..defaults };
        let runtime = longshore_server::runtime("server")?;
        let server = runtime.block_on(Server::start(config))?;
        let address = match args.transport() {
            Transport::Unix => format!("unix:{}", socket.display()),
            _ => server.address().to_string(),
        };
        let own = Own { _server: server, _runtime: runtime, _folder: folder };
        // A server of this process gets no credentials, whatever the environment says.
        Ok(Hosts { addresses: vec![address], access: Access::default(), own: Some(own) })
    }

    /// Credentials of ranks for these servers.
    pub(super) fn access(&self) -> &Access {
        &self.access
    }

    pub(super) fn addresses(&self) -> &[String] {
        &self.addresses
    }

    /// Returns the most bytes of memory that a server has reserved for the job.
    pub(super) fn reserved(&self, spec: &JobSpec) -> anyhow::Result<u64> {
        let request = v1::DescribeRequest { job: spec.name.to_string(), brief: true, ..Default::default() };
        let described = Servers::connect(&self.addresses, &self.access)?.each_promptly(|mut admin| {
            let request = request.clone();
            async move { admin.describe(request).await }
        })?;
        Ok(described.iter().map(|(_, job)| job.memory_bytes).max().unwrap_or(0))
    }

    /// Deletes the job from servers that go on running.
    pub(super) fn clear(&self, spec: &JobSpec) -> anyhow::Result<()> {
        if self.own.is_some() {
            return Ok(());
        }
        let request = v1::DeleteJobRequest { job: spec.name.to_string(), discard_unreadable: false };
        let deleted = Servers::connect(&self.addresses, &self.access)?.each(|mut admin| {
            let request = request.clone();
            async move { admin.delete_job(request).await }
        });
        deleted.map(|_| ()).context("deleting the bench's job")
    }
}
