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

/// A version, by its number and its decision: a number is given again when a step was taken back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reads {
    pub version: Version,
    /// The decision's [`crate::Commit::decided_by`]; 0 where it is unknown.
    pub decided_by: Incarnation,
}

/// A number that says from which processes contributions came: those of a shard, or those of all of a server's shards
/// added up. Equal numbers mean the same gradients to the bit, since a process never makes two of one batch. 0 is an
/// unknown origin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Origin(pub u64);

impl Origin {
    pub const UNKNOWN: Origin = Origin(0);

    /// The origin of both together. It is unknown where one of them is.
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
    /// What the loss of this gradient was multiplied by.
    pub loss_scale: f64,
    pub dtype: Dtype,
    /// How many bytes the payload has.
    pub bytes: u64,
    pub crc32: u32,
    /// The version that the gradient was computed with.
    pub reads: Reads,
    /// The chunk is all of the shard at once, in memory that its sender leaves as it is until the step's update is
    /// done. `chunk` is then 0, and there is no checksum, since nothing is moved.
    pub lent: bool,
}
