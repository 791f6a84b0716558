//! Keys of a rank's gradient chunks, and the queues of chunks to send: one for each data connection.

use longshore_proto::{ChunkId, MicroStep, ServerId, ShardId, Step};
use longshore_wire::v1::PushResult;
use tokio::sync::mpsc;

use crate::cluster::Met;

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

#[derive(Default)]
pub(super) struct Queues(Met<Vec<mpsc::Sender<ChunkKey>>>);

impl Queues {
    /// `open` starts a server's lanes, and returns the sender of each lane's queue. Lanes that are open stay.
    pub(super) fn open(&self, server: ServerId, open: impl FnOnce() -> Vec<mpsc::Sender<ChunkKey>>) {
        self.0.get_or_make(server, open);
    }

    pub(super) fn has(&self, server: ServerId) -> bool {
        self.0.get(server).is_some()
    }

    pub(super) fn of(&self, LaneId { server, connection }: LaneId) -> &mpsc::Sender<ChunkKey> {
        &self.0[server][connection]
    }
}
