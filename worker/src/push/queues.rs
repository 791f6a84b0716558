//! Keys of a rank's gradient chunks, and the queues of chunks to send: one for each data connection.

use longshore_proto::{ChunkId, MicroStep, ServerId, ShardId, Step};
use longshore_wire::v1::PushResult;
use tokio::sync::mpsc;

use crate::cluster::ByServer;

/// Key of a chunk of this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkKey {
    pub step: Step,
    pub micro_step: MicroStep,
    pub shard: ShardId,
    pub chunk: ChunkId,
}

impl From<&PushResult> for ChunkKey {
    fn from(result: &PushResult) -> ChunkKey {
        ChunkKey {
            step: Step(result.step),
            micro_step: MicroStep(result.micro_step),
            shard: ShardId(result.shard),
            chunk: ChunkId(result.chunk),
        }
    }
}

/// A data connection of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LaneId {
    pub(crate) server: ServerId,
    pub(crate) connection: usize,
}

pub(super) struct Queues(ByServer<Vec<mpsc::Sender<ChunkKey>>>);

impl Queues {
    /// `open` starts the lane that takes from a queue, and returns the queue's sender.
    pub(super) fn new(
        servers: impl Iterator<Item = ServerId>,
        connections: usize,
        open: impl Fn(LaneId) -> mpsc::Sender<ChunkKey>,
    ) -> Queues {
        let of = |server| (0..connections).map(|connection| open(LaneId { server, connection })).collect();
        Queues(servers.map(of).collect())
    }

    pub(super) fn of(&self, LaneId { server, connection }: LaneId) -> &mpsc::Sender<ChunkKey> {
        &self.0[server][connection]
    }
}
