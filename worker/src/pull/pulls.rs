//! What all pulls of a session share: the servers, their memory where they share it, and host memory for what arrives.

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
    /// By connection.
    turns: ByServer<Vec<Arc<Turns>>>,
}

impl Pulls {
    pub(crate) fn new(cluster: Arc<Cluster>, rank: Arc<RankState>) -> Pulls {
        let pool = BufferPool::tight(cluster.options.host_budget.clone(), "weights under way");
        let connections = cluster.options.connections;
        let turns = cluster.servers().map(|_| (0..connections).map(|_| Arc::default()).collect()).collect();
        Pulls { cluster, rank, pool, meter: Meter::default(), turns }
    }

    /// The order of pulls over a connection.
    pub(super) fn turns(&self, server: ServerId, connection: usize) -> &Arc<Turns> {
        &self.turns[server][connection]
    }

    /// The most bytes of weights that this host's memory held since the session began or [`Pulls::start_over`].
    pub(crate) fn most_held(&self) -> u64 {
        self.pool.most()
    }

    /// Gives up the memory of weights that nobody reads any more.
    pub(crate) fn start_over(&self) {
        self.pool.empty();
    }

    /// Whether all weights can be read where they lie in servers' memory, so that they take none here.
    pub(crate) fn are_lent(&self) -> bool {
        self.cluster.servers().all(|server| self.lends(server))
    }

    /// The memory of servers of this host that weights lie in.
    pub(crate) fn image_memory(&self) -> Vec<ImageMemory> {
        let images = |server| self.rank.link(server).and_then(|link| link.images.clone());
        self.cluster.servers().filter_map(images).map(ImageMemory::new).collect()
    }

    /// Whether a server's weights can be read where they lie in its memory.
    pub(super) fn lends(&self, server: ServerId) -> bool {
        self.rank.link(server).is_some_and(|link| link.images.is_some())
    }
}
