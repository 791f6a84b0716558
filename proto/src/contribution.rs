//! What identifies a gradient on its way to a server.

use std::fmt;

use crate::{
    dtype::Dtype,
    ids::{ChunkId, Incarnation, MicroStep, Rank, ShardId, Step, Version},
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

/// A version by its number and its decision: a number is given again where a step was taken back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reads {
    pub version: Version,
    /// As [`crate::Commit::decided_by`]; 0 where it is not known.
    pub decided_by: Incarnation,
}

/// From which processes contributions came: of a shard, or added up over a server's shards. Equal numbers mean the same gradients
/// to the bit, since a process never makes two of one batch. 0 is an origin that is not known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Origin(pub u64);

impl Origin {
    pub const UNKNOWN: Origin = Origin(0);

    /// The origin of both together: not known where one of them is not.
    pub fn and(self, other: Origin) -> Origin {
        match (self, other) {
            (Origin::UNKNOWN, _) | (_, Origin::UNKNOWN) => Origin::UNKNOWN,
            (Origin(one), Origin(other)) => Origin(one.wrapping_add(other).max(1)),
        }
    }

    /// Whether two origins are known and differ.
    pub fn differs(self, other: Origin) -> bool {
        self != Origin::UNKNOWN && other != Origin::UNKNOWN && self != other
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
    /// The version it was computed with.
    pub reads: Reads,
    /// All of the shard at once, in memory that its sender leaves as it is until the step's update is done. `chunk` is 0;
    /// there is no checksum, since nothing is moved.
    pub lent: bool,
}
