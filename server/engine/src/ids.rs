//! Indices that one server gives to its shards, contributors and gradient slots. Each kind has its own type, so the
//! compiler tells them apart.

use std::{iter, ops::Range};

use longshore_proto::{Rank, Step};

/// Index of a shard among those that this server has a place for, in forward order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct OwnedShard(pub usize);

/// Shards for which this server has a place, in forward order.
pub type OwnedShards = iter::Map<Range<usize>, fn(usize) -> OwnedShard>;

/// Index of a gradient slot: the buffers of one step in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GradientSlot(pub usize);

/// Index of a rank among a shard's contributors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Contributor(pub usize);

impl Contributor {
    /// The only contributor of a shard whose gradient is not summed.
    pub const LONE: Contributor = Contributor(0);

    /// Returns the index of `rank` among a shard's contributors, which are in ascending order. None if the
    /// rank is not a contributor.
    pub fn of(rank: Rank, contributors: &[Rank]) -> Option<Contributor> {
        contributors.binary_search(&rank).ok().map(Contributor)
    }

    /// Returns the indices of a shard's `count` contributors.
    pub fn all(count: usize) -> impl Iterator<Item = Contributor> {
        (0..count).map(Contributor)
    }

    pub fn index(self) -> usize {
        self.0
    }
}

impl OwnedShard {
    /// Returns the indices of a server's `count` places for shards.
    pub fn all(count: usize) -> OwnedShards {
        (0..count).map(OwnedShard)
    }

    pub fn index(self) -> usize {
        self.0
    }

    /// The index of the shard after this one. The server may not have that shard.
    pub fn next(self) -> OwnedShard {
        OwnedShard(self.0 + 1)
    }
}

impl GradientSlot {
    /// Returns the slot of a step in a job that has `slots` of them.
    pub fn of(step: Step, slots: usize) -> GradientSlot {
        GradientSlot((step.0 % slots as u64) as usize)
    }

    /// Returns all slots of a job that has `slots` of them.
    pub fn all(slots: usize) -> impl Iterator<Item = GradientSlot> {
        (0..slots).map(GradientSlot)
    }

    pub fn index(self) -> usize {
        self.0
    }
}
