//! Progress of a job, for status calls.

use longshore_proto::{Commit, Incarnation, LeftOut, Rank, ShardId, Step, Version};

use super::Phase;

#[derive(Clone, Debug, PartialEq)]
pub struct Progress {
    pub phase: Phase,
    /// The number of decided steps.
    pub version: Version,
    /// The number of decided steps that updated: Adam's t.
    pub applied: u64,
    pub last_commit: Option<Commit>,
    /// At version 0: the parameters whose state has had fewer updates than `applied`.
    pub left_out: Vec<LeftOut>,
    /// The shards that still lack weights, while the job is loading.
    pub missing: Vec<ShardId>,
    /// The checkpoint that the job is filled from, while it is loading.
    pub restoring: Option<Restoring>,
}

/// A restore that has begun and not started the job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Restoring {
    pub checkpoint: String,
    /// The number of shards loaded so far.
    pub shards: u32,
    /// All shards are loaded, and the job waits to be started.
    pub held: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub struct RankProgress {
    pub rank: Rank,
    /// None if the rank never joined this server.
    pub incarnation: Option<Incarnation>,
    pub left: bool,
    /// The version at which this incarnation joined.
    pub joined_at: Version,
    /// The newest step to which this rank has contributed.
    pub last_step: Step,
}
