//! A job's gradients: contributions, their sums and their statistics, whether in DRAM, lent, or on drives.

mod contribution;
mod left_out;
mod receive;
pub(super) mod spilled;
mod sum;

use std::sync::{Arc, Mutex};

use longshore_proto::{JobSpec, Layout, Rank, ShardId, Step};

pub use self::{
    contribution::Lent,
    receive::{Admitted, Stored, Writing, check_sum},
};
pub(super) use self::{
    contribution::{Contribution, cast},
    spilled::SpilledGradients,
    sum::take_sums,
};
use super::compute::Compute;
use crate::{
    ids::{Contributor, GradientSlot, OwnedShard, OwnedShards},
    kernels::Statistics,
    lock,
    memory::Region,
    step::Machine,
};

/// The gradients of the steps in flight. Each buffer has a lock of its own. A thread that holds one never
/// waits for the machine's lock.
pub(super) struct Gradients {
    spec: Arc<JobSpec>,
    layout: Arc<Layout>,
    owned: Vec<ShardId>,
    compute: Arc<Compute>,
    shards: Vec<ShardGradients>,
    /// Present in a job whose gradients live on drives.
    spilled: Option<SpilledGradients>,
}

/// The gradients of one shard, by gradient slot.
pub(super) struct ShardGradients {
    /// By slot, then by contributor.
    pub(super) contributions: Vec<Vec<Mutex<Contribution>>>,
    /// The sum, in fp32. None if the shard has one contribution in a step: updates then read the
    /// contribution.
    pub(super) accumulators: Vec<Option<Mutex<Region>>>,
    /// The gradient statistics of each block, once the step is complete.
    pub(super) statistics: Vec<Mutex<Vec<Statistics>>>,
    /// The parameters that begin in the shard and have no gradient, once the step is complete.
    pub(super) left_out: Vec<Mutex<Vec<u32>>>,
}

impl Gradients {
    pub(super) fn new(
        (spec, layout): (&Arc<JobSpec>, &Arc<Layout>),
        owned: &[ShardId],
        compute: &Arc<Compute>,
        shards: Vec<ShardGradients>,
        spilled: Option<SpilledGradients>,
    ) -> Gradients {
        let (spec, layout, owned) = (Arc::clone(spec), Arc::clone(layout), owned.to_vec());
        Gradients { spec, layout, owned, compute: Arc::clone(compute), shards, spilled }
    }

    pub(super) fn written_bytes(&self) -> u64 {
        self.spilled.as_ref().map_or(0, SpilledGradients::written_bytes)
    }

    /// The gradient slot that a step uses.
    pub(super) fn slot(&self, step: Step) -> GradientSlot {
        GradientSlot::of(step, self.spec.gradient_slots())
    }

    pub(super) fn contribution(
        &self,
        owned: OwnedShard,
        slot: GradientSlot,
        contributor: Contributor,
    ) -> &Mutex<Contribution> {
        &self.shards[owned.index()].contributions[slot.index()][contributor.index()]
    }

    /// The ranks that contribute to a shard.
    pub(super) fn contributors(&self, owned: OwnedShard) -> &[Rank] {
        self.layout.contributors(self.owned[owned.index()])
    }

    /// Returns true if a shard's contributions are summed.
    pub(super) fn accumulates(&self, owned: OwnedShard) -> bool {
        self.spec.accumulates(self.contributors(owned))
    }

    pub(super) fn accumulator(&self, owned: OwnedShard, slot: GradientSlot) -> Option<&Mutex<Region>> {
        self.shards[owned.index()].accumulators[slot.index()].as_ref()
    }

    pub(super) fn statistics(&self, owned: OwnedShard, slot: GradientSlot) -> Vec<Statistics> {
        lock(&self.shards[owned.index()].statistics[slot.index()]).clone()
    }

    fn set_statistics(&self, owned: OwnedShard, slot: GradientSlot, statistics: Vec<Statistics>) {
        *lock(&self.shards[owned.index()].statistics[slot.index()]) = statistics;
    }

    /// Releases the memory that senders lent for a step, once these shards are updated.
    pub(super) fn give_back(&self, run: OwnedShards, step: Step) {
        let slot = self.slot(step);
        let used = self.shards[run.indices()].iter().flat_map(|shard| &shard.contributions[slot.index()]);
        used.for_each(|rank| lock(rank).give_back());
    }

    /// Releases the memory that a rank's earlier process lent and that no sum or update needs.
    pub(super) fn give_back_unneeded(&self, machine: &Machine, rank: Rank) {
        for (owned, shard) in OwnedShards::all(self.shards.len()).zip(&self.shards) {
            let Some(contributor) = Contributor::of(rank, self.contributors(owned)) else { continue };
            for (slot, ranks) in GradientSlot::all(shard.contributions.len()).zip(&shard.contributions) {
                if !machine.holds(owned, slot, contributor) {
                    lock(&ranks[contributor.index()]).give_back();
                }
            }
        }
    }
}
