//! What identifies a gradient on its way to a server.

use std::fmt;

use crate::{
    dtype::Dtype,
    ids::{ChunkId, Incarnation, MicroStep, Rank, ShardId, Step},
};

/// One rank's gradient for one shard, for one (step, micro-step).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Contribution {
    pub step: Step,
    pub micro_step: MicroStep,
    pub rank: Rank,
    pub shard: ShardId,
}

impl fmt::Display for Contribution {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}, {}, {}", self.step, self.micro_step, self.rank, self.shard)
    }
}

/// One chunk of a contribution, with all that is checked before its bytes are stored.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ContributionChunk {
    pub contribution: Contribution,
    pub incarnation: Incarnation,
    pub chunk: ChunkId,
    /// The loss this gradient came from was multiplied by this.
    pub loss_scale: f64,
    pub dtype: Dtype,
    /// Payload bytes.
    pub bytes: u64,
    pub crc32: u32,
    /// All of the shard at once, in memory that its sender leaves as it is until the step's update is done. `chunk` is 0;
    /// there is no checksum, since nothing is moved.
    pub lent: bool,
}
