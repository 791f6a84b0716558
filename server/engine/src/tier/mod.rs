//! Where a job's fp32 state lives. The step protocol is the same on every tier.

mod memory;

use longshore_proto::{Fault, TierKind, Version};

pub use memory::MemoryTier;

use crate::kernels::State;

/// A shard's master weights and optimizer state, whole blocks. Unused slots are empty.
#[derive(Clone, Copy)]
pub struct StateRef<'a> {
    pub master: &'a [f32],
    pub first: &'a [f32],
    pub second: &'a [f32],
}

/// The state of a server's shards of one job. Shards are numbered as they are owned, in forward order.
///
/// A closure gets the state, so that a tier can bring it in before and write it back after. An error means that the
/// closure did not run or that its result may not survive: the job cannot go on from this server.
pub trait Tier: Send + Sync {
    fn kind(&self) -> TierKind;

    /// Runs the update that makes `version` of a shard.
    fn update(&self, owned: usize, version: Version, update: &mut dyn FnMut(State<'_>)) -> Result<(), Fault>;

    /// Reads a shard as its last update left it.
    fn read(&self, owned: usize, read: &mut dyn FnMut(StateRef<'_>)) -> Result<(), Fault>;
}
