//! A job's gradients: contributions, sums and statistics, in DRAM, lent, or on drives. Calls write contributions on
//! their own threads; the compute thread forms sums.

mod contribution;
pub(super) mod spilled;
mod sum;

use std::sync::{Arc, Mutex, atomic::AtomicU64};

use longshore_proto::{Fault, Rank, Step};

pub use self::contribution::Lent;
pub(super) use self::{
    contribution::{Contribution, LENT_ALIGNMENT, cast, statistics_within},
    spilled::{SpilledGradients, Staged},
    sum::{first_nonfinite, take_sums},
};
use super::{compute::Compute, share::Share};
use crate::{
    admission::exhausted,
    ids::{Contributor, GradientSlot, OwnedShard},
    kernels::Statistics,
    lock,
    memory::Region,
    step::Machine,
};

/// The gradients of the steps in flight. Each buffer has a lock of its own. A thread that holds one never
/// waits for the machine's lock.
pub struct Gradients {
    share: Arc<Share>,
    compute: Arc<Compute>,
    shards: Vec<ShardGradients>,
    /// Present in a job whose gradients live on drives.
    pub(super) spilled: Option<SpilledGradients>,
    /// Bytes of payload that were pushed since the job was opened here.
    pub(super) pushed_bytes: AtomicU64,
}

/// The gradients of one shard, by gradient slot.
pub(super) struct ShardGradients {
    /// Contributions by slot, then by contributor.
    pub(super) contributions: Vec<Vec<Mutex<Contribution>>>,
    /// The fp32 sum of each slot. None if a step has a single contribution, which updates read instead.
    pub(super) accumulators: Vec<Option<Mutex<Region>>>,
    /// The gradient statistics of each block, once the step is complete.
    pub(super) statistics: Vec<Mutex<Vec<Statistics>>>,
    /// The parameters that begin in the shard and have no gradient, once the step is complete.
    pub(super) left_out: Vec<Mutex<Vec<u32>>>,
}

impl Gradients {
    pub(super) fn new(
        share: &Arc<Share>,
        compute: &Arc<Compute>,
        shards: Vec<ShardGradients>,
        spilled: Option<SpilledGradients>,
    ) -> Gradients {
        let (share, compute) = (Arc::clone(share), Arc::clone(compute));
        Gradients { share, compute, shards, spilled, pushed_bytes: AtomicU64::new(0) }
    }

    /// Returns true if gradients that are not lent live on drives.
    pub fn are_spilled(&self) -> bool {
        self.spilled.is_some()
    }

    /// Sets `arrival`, which is called on any thread whenever `Job::collect` has something to do. May be set
    /// once, before the first chunk comes.
    pub fn on_arrival(&self, arrival: Box<dyn Fn() + Send + Sync>) {
        if let Some(spilled) = &self.spilled {
            spilled.on_arrival(arrival);
        }
    }

    pub(super) fn written_bytes(&self) -> u64 {
        self.spilled.as_ref().map_or(0, SpilledGradients::written_bytes)
    }

    pub(super) fn contribution(
        &self,
        owned: OwnedShard,
        slot: GradientSlot,
        contributor: Contributor,
    ) -> &Mutex<Contribution> {
        &self.shards[owned.index()].contributions[slot.index()][contributor.index()]
    }

    pub(super) fn accumulator(&self, owned: OwnedShard, slot: GradientSlot) -> Option<&Mutex<Region>> {
        self.shards[owned.index()].accumulators[slot.index()].as_ref()
    }

    pub(super) fn statistics(&self, owned: OwnedShard, slot: GradientSlot) -> Vec<Statistics> {
        lock(&self.shards[owned.index()].statistics[slot.index()]).clone()
    }

    pub(super) fn set_statistics(&self, owned: OwnedShard, slot: GradientSlot, statistics: Vec<Statistics>) {
        *lock(&self.shards[owned.index()].statistics[slot.index()]) = statistics;
    }

    /// Returns the parameters that were found to have no gradient, in ascending order.
    pub(super) fn left_out(&self, owned: OwnedShard, slot: GradientSlot) -> Vec<u32> {
        lock(&self.shards[owned.index()].left_out[slot.index()]).clone()
    }

    fn set_left_out(&self, owned: OwnedShard, slot: GradientSlot, found: Vec<u32>) {
        *lock(&self.shards[owned.index()].left_out[slot.index()]) = found;
    }

    /// Releases the memory that senders lent for a step, once these shards are updated.
    pub(super) fn give_back(&self, run: &[OwnedShard], step: Step) {
        let slot = self.share.slot(step);
        let used = run.iter().flat_map(|owned| &self.shards[owned.index()].contributions[slot.index()]);
        used.for_each(|rank| lock(rank).give_back());
    }

    /// Reserves space in files for the gradients of a shard that shall come to this server.
    pub(super) fn make_room(&self, owned: OwnedShard) -> Result<(), Fault> {
        self.spilled.as_ref().map_or(Ok(()), |spilled| spilled.files().make_room(owned))?;
        let Some(shard) = self.shards.get(owned.index()) else { return Ok(()) };
        let mut contributions = shard.contributions.iter().flatten();
        contributions.try_for_each(|contribution| lock(contribution).reserve()).map_err(exhausted)?;
        let mut sums = shard.accumulators.iter().flatten();
        sums.try_for_each(|sum| lock(sum).reserve()).map_err(exhausted)
    }

    /// Frees the memory and space of a shard's gradients. Another server takes the gradients from now on.
    pub(super) fn release(&self, owned: OwnedShard) {
        self.spilled.iter().for_each(|spilled| spilled.files().release(owned));
        let Some(shard) = self.shards.get(owned.index()) else { return };
        shard.contributions.iter().flatten().for_each(|contribution| lock(contribution).release());
        for sum in shard.accumulators.iter().flatten() {
            if let Err(error) = lock(sum).give_back() {
                tracing::debug!(%error, "memory of a sum stays");
            }
        }
    }

    /// Releases the memory that a rank's earlier process lent and that no sum or update needs.
    pub(super) fn give_back_unneeded(&self, machine: &Machine, rank: Rank) {
        for (owned, shard) in self.share.all().zip(&self.shards) {
            let Some(contributor) = Contributor::of(rank, self.share.contributors(owned)) else { continue };
            for (slot, ranks) in GradientSlot::all(shard.contributions.len()).zip(&shard.contributions) {
                if !machine.holds(owned, slot, contributor) {
                    lock(&ranks[contributor.index()]).give_back();
                }
            }
        }
    }
}
