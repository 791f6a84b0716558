//! Keys of a rank's gradient chunks, and of the connections that carry them.

use longshore_proto::{ChunkId, MicroStep, ServerId, ShardId, Step};
use longshore_wire::v1::PushResult;

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
