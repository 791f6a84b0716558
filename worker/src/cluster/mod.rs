//! The servers of one job, as one rank reaches them: connections, calls until an answer comes, and waits.

mod address;
mod by_server;
mod call;
mod options;
mod pace;
mod patience;
mod peer;
mod retry;
mod runtime;
mod waits;

use std::sync::{Arc, atomic::AtomicU64};

use futures_util::future::try_join_all;
use longshore_proto::{JobName, JobSpec, Layout, Placement, ServerId, ShardId};
use longshore_wire::{frame::keep_buffers, tls::Credentials};

pub use self::{
    address::Address,
    options::{Options, Process, Transport},
    peer::{untrusted, whole, with_sources},
    runtime::Interrupt,
};
pub(crate) use self::{
    by_server::ByServer,
    peer::Peer,
    retry::{Backoff, renewed},
    runtime::{Ended, Task},
    waits::Impatience,
};
use self::{pace::Pace, patience::Troubles, runtime::Runtime, waits::Waits};
use crate::{
    error::{Misuse, Result},
    host::Instant,
};

/// A job's servers. Every call of a session goes through its `Cluster`.
pub(crate) struct Cluster {
    pub(crate) options: Options,
    pub(crate) layout: Layout,
    pub(crate) placement: Placement,
    /// The incarnation that this process joined as; 0 before.
    pub(crate) incarnation: Arc<AtomicU64>,
    peers: ByServer<Peer>,
    pub(crate) troubles: Troubles,
    pub(crate) waits: Waits,
    pub(crate) runtime: Runtime,
}

impl Cluster {
    /// Connects to every server, retrying until the deadline. Servers without a shard would take part in no step,
    /// so a job of few shards is placed on the first servers.
    pub(crate) fn connect(mut options: Options) -> Result<Cluster> {
        let layout = options.validate()?;
        let shards = layout.shards();
        if options.servers.len() > shards as usize {
            let (job, servers) = (&options.spec.name, options.servers.len());
            tracing::warn!(%job, servers, shards, "the job has fewer shards than servers: the last servers are left out");
            options.servers.truncate(shards as usize);
        }
        keep_buffers();
        let runtime = Runtime::start(options.runtime.clone(), options.interrupt.clone())?;
        let placement = Placement::striped(options.servers.clone(), shards);
        placement.validate(shards)?;
        let start = Instant::now();
        let end = start + options.deadline;
        let pace = options.link_bytes_per_s.map(Pace::new);
        let credentials = options.tls_dir.as_deref();
        let credentials =
            credentials.map(|dir| Credentials::read_with(dir, options.token_file.as_deref())).transpose()?;
        let credentials = credentials.as_ref();
        let dial =
            |address| Peer::connect(address, credentials, options.connections, pace.as_ref(), (start, end));
        let peers = runtime.block_on(try_join_all(options.servers.iter().map(|address| dial(address))))?;
        let peers = ByServer::from_iter(peers);
        let troubles = Troubles::new(peers.len());
        let waits = Waits::new(&options);
        let incarnation = Arc::default();
        Ok(Cluster { options, layout, placement, incarnation, peers, troubles, waits, runtime })
    }

    pub(crate) fn spec(&self) -> &JobSpec {
        &self.options.spec
    }

    pub(crate) fn job(&self) -> &JobName {
        &self.options.spec.name
    }

    /// Every server, in the placement's order.
    pub(crate) fn servers(&self) -> impl ExactSizeIterator<Item = ServerId> + use<> {
        self.peers.ids()
    }

    pub(crate) fn peer(&self, server: ServerId) -> &Peer {
        &self.peers[server]
    }

    /// A server's address as the user wrote it, for errors.
    pub(crate) fn address(&self, server: ServerId) -> &str {
        &self.peers[server].address
    }

    /// The addresses of all servers.
    pub(crate) fn addresses(&self) -> impl Iterator<Item = String> {
        self.peers.values().map(|peer| peer.address.clone())
    }

    pub(crate) fn owner(&self, shard: ShardId) -> ServerId {
        self.placement.owner(shard)
    }

    /// Ends the session's tasks, and fails all waits.
    pub(crate) fn stop(&self) {
        self.runtime.end_tasks();
        self.waits.fail(Misuse("the session has ended: connect a new one").into());
    }
}

#[cfg(test)]
pub(crate) mod fake_for_tests;
#[cfg(test)]
mod recovery_tests;
