//! Where a job stands, for those who ask.

use longshore_proto::{Commit, Incarnation, Rank, ShardId, Step, Version};

use super::Phase;

#[derive(Clone, Debug, PartialEq)]
pub struct Progress {
    pub phase: Phase,
    /// Decided steps.
    pub version: Version,
    /// Decided steps that updated: Adam's t.
    pub applied: u64,
    pub last_commit: Option<Commit>,
    /// While loading: shards without all their weights.
    pub missing: Vec<ShardId>,
    /// While loading: the checkpoint that it is filled from.
    pub restoring: Option<Restoring>,
}

/// A restore that has begun and not started the job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Restoring {
    pub checkpoint: String,
    /// Loaded so far.
    pub shards: u32,
    /// Wholly loaded: waits for the word to start.
    pub held: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub struct RankProgress {
    pub rank: Rank,
    /// None: never joined this server.
    pub incarnation: Option<Incarnation>,
    pub left: bool,
    /// The version at which this incarnation joined.
    pub joined_at: Version,
    /// Newest step with a contribution from this rank.
    pub last_step: Step,
}
