//! Identity of a gradient on its way to a server.

use std::fmt;

use crate::{
    dtype::Dtype,
    ids::{ChunkId, Incarnation, MicroStep, Rank, ShardId, Step, Version},
};

/// A rank's gradient for one shard, for one (step, micro-step).
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

/// A version's number and decision. The number alone is ambiguous, since a step back gives it to another decision.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reads {
    pub version: Version,
    /// [`crate::Commit::decided_by`] of the decision; 0 if unknown.
    pub decided_by: Incarnation,
}

/// Number that tells which processes contributed to one shard, or to all shards of a server. Equal numbers mean
/// bit-equal gradients, since a process never computes a batch twice. 0 is an unknown origin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Origin(pub u64);

impl Origin {
    pub const UNKNOWN: Origin = Origin(0);

    /// Returns the combined origin, unknown if either is unknown.
    pub fn and(self, other: Origin) -> Origin {
        match (self, other) {
            (Origin::UNKNOWN, _) | (_, Origin::UNKNOWN) => Origin::UNKNOWN,
            (Origin(one), Origin(other)) => Origin(one.wrapping_add(other).max(1)),
        }
    }

    pub fn differs(self, other: Origin) -> bool {
        self != Origin::UNKNOWN && other != Origin::UNKNOWN && self != other
    }
}

/// A chunk of a contribution, with every field that is checked before its bytes are stored.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ContributionChunk {
    pub contribution: Contribution,
    pub incarnation: Incarnation,
    pub chunk: ChunkId,
    /// Factor that the loss of this gradient was multiplied by.
    pub loss_scale: f64,
    pub dtype: Dtype,
    /// Payload bytes.
    pub bytes: u64,
    pub crc32: u32,
    /// Version that the gradient was computed with.
    pub reads: Reads,
    /// The payload is the whole shard, in memory that the sender leaves unchanged until the step's update is done.
    /// `chunk` is then 0. No bytes are copied, so there is no checksum.
    pub lent: bool,
}
