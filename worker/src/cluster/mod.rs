//! The servers of one job as one rank reaches them: connections, repeated calls, and waits. A session owns one
//! `Cluster`, and shares it with background tasks.

mod address;
mod by_server;
mod call;
mod connect;
mod losses;
mod members;
mod options;
mod pace;
mod patience;
mod peer;
mod retry;
mod runtime;
mod waits;

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU64},
};

use longshore_proto::{JobName, JobSpec, Layout, ServerId};
use longshore_wire::{frame::keep_buffers, tls::Credentials};

pub use self::{
    address::Address,
    options::{Options, Process, Transport},
    peer::{untrusted, whole, with_sources},
    runtime::Interrupt,
};
pub(crate) use self::{
    by_server::{ByServer, Met},
    losses::Losses,
    peer::Peer,
    retry::{Backoff, renewed},
    runtime::{Ended, Task},
    waits::Impatience,
};
use self::{members::Members, pace::Pace, patience::Troubles, runtime::Runtime, waits::Waits};
use crate::error::{Misuse, Result};

/// A job's servers. Every call of a session goes through its `Cluster`.
pub(crate) struct Cluster {
    pub(crate) options: Options,
    pub(crate) layout: Layout,
    members: Members,
    /// The incarnation that this process joined as; 0 before.
    pub(crate) incarnation: Arc<AtomicU64>,
    /// True once a pipeline has begun. From then on a server that waits for weights has lost the job's state.
    pub(crate) trained: Arc<AtomicBool>,
    peers: Met<Peer>,
    credentials: Option<Credentials>,
    pace: Option<Pace>,
    pub(crate) troubles: Troubles,
    pub(crate) waits: Waits,
    pub(crate) runtime: Runtime,
}

impl Cluster {
    /// Connects to every server, retrying until the deadline. A job with fewer shards than servers is placed on the
    /// first servers.
    pub(crate) fn connect(mut options: Options) -> Result<Cluster> {
        let layout = options.validate()?;
        let (shards, mut listed) = (layout.shards(), options.servers.clone());
        if options.servers.len() > shards as usize {
            let (job, servers) = (&options.spec.name, options.servers.len());
            tracing::warn!(%job, servers, shards, "the job has fewer shards than servers: the last servers are left out");
            options.servers.truncate(shards as usize);
        }
        keep_buffers();
        let runtime = Runtime::start(options.runtime.clone(), options.interrupt.clone())?;
        let placement = options.spec.striped(options.servers.clone(), shards);
        placement.validate(shards)?;
        let pace = options.link_bytes_per_s.map(Pace::new);
        let credentials = options.tls_dir.as_deref();
        let credentials =
            credentials.map(|dir| Credentials::read_with(dir, options.token_file.as_deref())).transpose()?;
        // In a job with replicas, a server that is left out may have the shards of a lost one.
        if options.spec.replicas == 1 {
            listed.clone_from(&options.servers);
        }
        let connected = (0..options.servers.len() as u32).map(ServerId).collect();
        let (troubles, waits) = (Troubles::default(), Waits::new(&options));
        let members = Members::new(placement, connected);
        let (incarnation, trained, peers) = Default::default();
        let mut cluster = Cluster {
            options,
            layout,
            members,
            incarnation,
            trained,
            peers,
            credentials,
            pace,
            troubles,
            waits,
            runtime,
        };
        cluster.runtime.block_on(cluster.connect_all(&listed)).map(|members| {
            cluster.members = members.unwrap_or(cluster.members);
            cluster
        })
    }

    pub(crate) fn spec(&self) -> &JobSpec {
        &self.options.spec
    }

    pub(crate) fn job(&self) -> &JobName {
        &self.options.spec.name
    }

    pub(crate) fn peer(&self, server: ServerId) -> &Peer {
        &self.peers[server]
    }

    /// A server's address as the user wrote it, for errors. A server that was lost before this session has none.
    pub(crate) fn address(&self, server: ServerId) -> &str {
        self.peers.get(server).map_or("a lost server", |peer| &peer.address)
    }

    /// The addresses of all servers.
    pub(crate) fn addresses(&self) -> impl Iterator<Item = String> {
        self.servers().map(|server| self.address(server).to_string())
    }

    /// Ends the session's tasks, and fails all waits.
    pub(crate) fn stop(&self) {
        self.runtime.end_tasks();
        self.waits.fail(Misuse("the session has ended: connect a new one").into());
    }
}

#[cfg(test)]
pub(crate) mod fake_for_tests;
