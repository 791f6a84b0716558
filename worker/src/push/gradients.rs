//! A rank's gradients: the pool of their memory, the retained chunks, and the queues of the lanes. A session owns
//! them. Assemblers fill the queues on the trainer's threads, and lanes empty them.

use std::sync::{Arc, OnceLock};

use longshore_proto::{Rank, ServerId, ShardId, Step};
use tokio::sync::mpsc;

use super::{ChunkKey, retained::Retained};
use crate::{
    cluster::{ByServer, Cluster, Met},
    device::{BufferPool, PooledBuffer},
    error::{Misuse, Result, Shortage},
    memfd::GradientMemory,
    meter::Meter,
    rank::RankState,
};

const RETAINED: &str = "gradients retained until their step is committed";

/// The way of a shard's gradient to its server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// In chunks, each sent once it is complete.
    Chunks,
    /// Lent as a whole: the server reads it in this process's memory.
    Lent,
}

/// Queues of chunks to send, by server and connection.
pub(super) type Queues = Met<Vec<mpsc::Sender<ChunkKey>>>;

pub(crate) struct Gradients {
    pub(super) cluster: Arc<Cluster>,
    pub(super) rank: Arc<RankState>,
    pub(super) pool: BufferPool,
    pub(crate) retained: Retained,
    /// Empty until the rank has joined.
    pub(super) queues: OnceLock<Queues>,
    pub(crate) meter: Meter,
}

impl Gradients {
    pub(crate) fn new(cluster: Arc<Cluster>, rank: Arc<RankState>) -> Gradients {
        let budget = cluster.options.host_budget.clone();
        let pool = match cluster.options.transport.may_share() {
            true => BufferPool::shared(budget, RETAINED),
            false => BufferPool::new(budget, RETAINED),
        };
        let (retained, queues, meter) = (Retained::default(), OnceLock::new(), Meter::default());
        Gradients { cluster, rank, pool, retained, queues, meter }
    }

    /// Takes memory for a chunk. Servers of this host can read it, if the transport allows.
    pub(crate) fn buffer(&self, bytes: usize) -> Result<PooledBuffer, Shortage> {
        self.pool.take(bytes)
    }

    /// Memory of the pool's buffers, for a device that copies gradients into it. None if no server may read that
    /// memory.
    pub(crate) fn memory(&self) -> Option<GradientMemory> {
        self.pool.kept()
    }

    pub(crate) fn has_lanes(&self, server: ServerId) -> bool {
        self.queues().is_ok_and(|queues| queues.get(server).is_some())
    }

    pub(super) fn queues(&self) -> Result<&Queues, Misuse> {
        self.queues.get().ok_or(Misuse("join before pushing"))
    }

    /// Returns each shard's way. A gradient is lent to a server of this host if this rank pulls all weights. Once the
    /// weights have arrived, the server's updates are done, and the gradient is read no more.
    pub(crate) fn ways(&self, step: Step, sees_all_weights: bool) -> Vec<Way> {
        let (cluster, placement) = (&self.cluster, self.cluster.placement());
        if cluster.spec().replicas > 1 {
            // The weights of an owner do not tell that its replica's update is done.
            return vec![Way::Chunks; cluster.layout.shards() as usize];
        }
        let lends = |server| sees_all_weights && self.rank.link(server).is_some();
        let way = |server| if lends(server) { Way::Lent } else { Way::Chunks };
        let by_server = ByServer::new(cluster.servers(), way);
        let owner = |shard| placement.owner_at(ShardId(shard), step);
        // The server that reads a moving shard's gradient does not send the shard's weights.
        let stays = |shard| owner(shard) == placement.owner(ShardId(shard));
        let way = |shard| match by_server.get(owner(shard)) {
            Some(way) if stays(shard) => *way,
            _ => Way::Chunks,
        };
        (0..cluster.layout.shards()).map(way).collect()
    }

    /// Frees the gradients that no server can need, now that `step` is committed.
    ///
    /// The gradients of `step` itself stay in two cases. An `nvme` server may come back one version behind, since
    /// only the version before is durable everywhere. Ranks other than 0 hear of a commit from one server while
    /// another server may lack it.
    pub(crate) fn committed(&self, step: Step) {
        let cluster = &self.cluster;
        let hearsay = cluster.options.rank != Rank(0) && cluster.servers().len() > 1;
        let lag = u64::from(hearsay || cluster.has_durable_later());
        self.retained.release(Step(step.0.saturating_sub(lag)));
    }

    /// Number of chunks that no server has acknowledged yet.
    pub(crate) fn unacknowledged(&self) -> usize {
        self.retained.unacknowledged()
    }
}
