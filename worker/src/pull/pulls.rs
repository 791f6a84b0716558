//! State that all pulls of a session share: the cluster, servers' image memory, and a pool of host memory.

use std::sync::Arc;

use longshore_proto::ServerId;

use super::turns::Turns;
use crate::{
    cluster::{ByServer, Cluster},
    device::BufferPool,
    memfd::ImageMemory,
    meter::Meter,
    rank::RankState,
};

pub(crate) struct Pulls {
    pub(super) cluster: Arc<Cluster>,
    pub(super) rank: Arc<RankState>,
    pub(super) pool: BufferPool,
    pub(crate) meter: Meter,
    /// Queues of turns by server and connection.
    turns: ByServer<Vec<Arc<Turns>>>,
}

impl Pulls {
    pub(crate) fn new(cluster: Arc<Cluster>, rank: Arc<RankState>) -> Pulls {
        let pool = BufferPool::tight(cluster.options.host_budget.clone(), "weights under way");
        let connections = cluster.options.connections;
        let turns = cluster.servers().map(|_| (0..connections).map(|_| Arc::default()).collect()).collect();
        Pulls { cluster, rank, pool, meter: Meter::default(), turns }
    }

    /// Returns the queue of pulls of a connection.
    pub(super) fn turns(&self, server: ServerId, connection: usize) -> &Arc<Turns> {
        &self.turns[server][connection]
    }

    /// The most bytes of weights in this host's memory since the session began or [`Pulls::start_over`].
    pub(crate) fn most_held(&self) -> u64 {
        self.pool.most()
    }

    /// Frees the memory of weights that have no reader any more.
    pub(crate) fn start_over(&self) {
        self.pool.empty();
    }

    /// Returns true if all weights are readable in servers' memory, so that they take none here.
    pub(crate) fn are_lent(&self) -> bool {
        self.cluster.servers().all(|server| self.lends(server))
    }

    /// Memory of servers of this host that holds weights.
    pub(crate) fn image_memory(&self) -> Vec<ImageMemory> {
        let images = |server| self.rank.link(server).and_then(|link| link.images.clone());
        self.cluster.servers().filter_map(images).map(ImageMemory::new).collect()
    }

    /// Returns true if a server's weights are readable in its memory.
    pub(super) fn lends(&self, server: ServerId) -> bool {
        self.rank.link(server).is_some_and(|link| link.images.is_some())
    }
}
