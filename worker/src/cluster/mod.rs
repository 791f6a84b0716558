//! The servers of one job, as one rank reaches them: connections, calls until an answer comes, and waits.

mod address;
mod by_server;
mod call;
mod members;
mod options;
mod pace;
mod patience;
mod peer;
mod retry;
mod runtime;
mod waits;

use std::sync::{Arc, atomic::AtomicU64};

use futures_util::future::{join_all, try_join_all};
use longshore_proto::{JobName, JobSpec, Layout, ServerId};
use longshore_wire::{frame::keep_buffers, local, tls::Credentials};

pub use self::{
    address::Address,
    options::{Options, Process, Transport},
    peer::{untrusted, whole, with_sources},
    runtime::Interrupt,
};
pub(crate) use self::{
    by_server::{ByServer, Met},
    peer::Peer,
    retry::{Backoff, renewed},
    runtime::{Ended, Task},
    waits::Impatience,
};
use self::{
    members::{GLANCE, Members, discover, lost_servers},
    pace::Pace,
    patience::Troubles,
    runtime::Runtime,
    waits::Waits,
};
use crate::{
    error::{Misuse, Result},
    host::Instant,
};

/// A job's servers. Every call of a session goes through its `Cluster`.
pub(crate) struct Cluster {
    pub(crate) options: Options,
    pub(crate) layout: Layout,
    members: Members,
    /// The incarnation that this process joined as; 0 before.
    pub(crate) incarnation: Arc<AtomicU64>,
    peers: Met<Peer>,
    credentials: Option<Credentials>,
    pace: Option<Pace>,
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
        let placement = options.spec.striped(options.servers.clone(), shards);
        placement.validate(shards)?;
        let pace = options.link_bytes_per_s.map(Pace::new);
        let credentials = options.tls_dir.as_deref();
        let credentials =
            credentials.map(|dir| Credentials::read_with(dir, options.token_file.as_deref())).transpose()?;
        let servers = options.servers.clone();
        let connected = (0..servers.len() as u32).map(ServerId).collect();
        let (troubles, waits) = (Troubles::default(), Waits::new(&options));
        let (members, incarnation) = (Members::new(placement, connected), Arc::default());
        let peers = Met::default();
        let mut cluster = Cluster {
            options,
            layout,
            members,
            incarnation,
            peers,
            credentials,
            pace,
            troubles,
            waits,
            runtime,
        };
        cluster.runtime.block_on(cluster.connect_all(&servers)).map(|members| {
            cluster.members = members.unwrap_or(cluster.members);
            cluster
        })
    }

    /// Connects with the listed servers; then, if the job's servers have changed since it was opened, with those.
    async fn connect_all(&self, servers: &[String]) -> Result<Option<Members>> {
        let start = Instant::now();
        let time = (start, start + self.options.deadline);
        let (lost, servers) = self.lost_of(servers, start).await;
        let peers = try_join_all(servers.iter().map(|(_, address)| self.dial(address, time))).await?;
        let ends = (time.1, start + self.options.slow_deadline);
        let Some((placement, numbers)) = discover(self.job().as_str(), &peers, ends).await else {
            servers.into_iter().zip(peers).for_each(|((server, _), peer)| self.add_peer(server, peer));
            self.give_up(&lost);
            // The first placement may not allow these losses: then a newer one exists, and its answer was lost.
            for server in self.servers() {
                self.meet(server, &self.placement().servers[server.0 as usize]).await?;
            }
            return Ok(None);
        };
        for (number, peer) in numbers.into_iter().zip(peers) {
            // The address tells the number of a member that is slow to answer.
            let of_address = || {
                let is_it = |of: &ServerId| placement.servers[of.0 as usize] == peer.address;
                placement.members().find(is_it)
            };
            match number.or_else(of_address) {
                Some(server) => self.add_peer(server, peer),
                None => {
                    let (job, on) = (self.job(), placement.addresses().collect::<Vec<_>>().join(","));
                    let named = &peer.address;
                    tracing::warn!(
                        "job {job} is on {on}, and not on {named}: `longshore scale --servers {on} --job {job} --add {named}` takes it \
                         there while it trains"
                    );
                }
            }
        }
        let members =
            placement.members().filter(|server| !lost.contains(&placement.servers[server.0 as usize]));
        let connected: Vec<ServerId> = members.collect();
        for &server in &connected {
            self.meet(server, &placement.servers[server.0 as usize]).await?;
        }
        let members = Members::new(placement, connected);
        members.give_up(&lost);
        Ok(Some(members))
    }

    /// Returns the addresses of servers that are gone for good, as reachable ones say, and the others with the numbers that
    /// they have in a job that was never moved. Without replicas no server may be gone.
    async fn lost_of(&self, servers: &[String], start: Instant) -> (Vec<String>, Vec<(ServerId, String)>) {
        let numbered = || (0..).map(ServerId).zip(servers.iter().cloned());
        if self.spec().replicas == 1 {
            return (Vec::new(), numbered().collect());
        }
        let soon = (start, start + GLANCE);
        let reached = join_all(servers.iter().map(|address| self.dial(address, soon))).await;
        let peers: Vec<Peer> = reached.into_iter().filter_map(Result::ok).collect();
        let lost = lost_servers(self.job().as_str(), &peers).await;
        (lost.clone(), numbered().filter(|(_, address)| !lost.contains(address)).collect())
    }

    /// Connects with a server, retrying until the end of `time`.
    pub(crate) async fn dial(&self, address: &str, time: (Instant, Instant)) -> Result<Peer> {
        let connections = self.options.connections;
        // Calls of a server in this process run on this session's threads, which a caller's runtime need not have.
        let may_be_here = self.options.transport.may_share() && self.pace.is_none() && self.runtime.is_own();
        if let Some(channel) = local::channel(address).filter(|_| may_be_here) {
            return Ok(Peer::without_sockets(address, connections, || channel.clone()));
        }
        Peer::connect(address, self.credentials.as_ref(), connections, self.pace.as_ref(), time).await
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
#[cfg(test)]
mod recovery_tests;
