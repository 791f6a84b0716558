//! Shards whose state is broken: a bit has flipped in this server's memory. The block's next update finds the flip.
//! Rank 0's next decision then gives the shard to its other holder.
//!
//! Until that decision counts, this server takes the shard's gradients as before, and its updates change nothing. Pulls
//! of later versions are refused, so that ranks ask the other holder.

use longshore_proto::{BlockId, Handover, ShardId, Step};

use super::{
    machine::Machine,
    refusal::Refusal,
    shard::{Broken, ShardProgress},
};
use crate::ids::OwnedShard;

impl Machine {
    /// Marks a shard with a block that differs from its checksum as broken. Returns true for the first such block, and
    /// the shard's refusal. A shard that was just moved back is not broken: its state is fetched anew.
    pub fn broke(&mut self, owned: OwnedShard, block: BlockId) -> (bool, Refusal) {
        let shard = &mut self.shards[owned.index()];
        let is_new = shard.broken.is_none() && !shard.awaited;
        if is_new {
            shard.broken = Some(Broken { block, image: shard.version });
        }
        let shard = shard.shard;
        (is_new, self.broken_at(shard, block))
    }

    /// The shards of this server whose state is broken.
    pub fn broken(&self) -> Vec<ShardId> {
        self.shards.iter().filter(|shard| shard.broken.is_some()).map(|shard| shard.shard).collect()
    }

    /// The shards of a run whose state is not broken.
    pub fn whole(&self, run: &[OwnedShard]) -> Vec<OwnedShard> {
        run.iter().copied().filter(|owned| self.shards[owned.index()].broken.is_none()).collect()
    }

    /// Returns the refusal of a broken shard without another whole copy, which ends the job. A server that is still
    /// fetching the shard from here has no copy.
    pub fn irreparable(&self) -> Option<Refusal> {
        let mut broken = self.shards.iter().filter_map(|shard| Some((shard, shard.broken?)));
        let (shard, broken) = broken.find(|(shard, _)| self.is_last(shard))?;
        Some(Refusal::broken((&self.spec, &self.layout), shard.shard, broken.block, true))
    }

    fn is_last(&self, progress: &ShardProgress) -> bool {
        let (placement, shard, end) = (&self.placement, progress.shard, progress.span.end);
        let is_awaited = |of: &Handover| {
            let next = if of.is_replica { placement.replica(shard) } else { Some(placement.owner(shard)) };
            let held = |next| placement.holders_at(shard, Step(end - 1)).any(|holder| holder == next);
            (of.shard, of.before, of.from_step) == (shard, self.server, Step(end))
                && next.is_some_and(|next| !held(next))
        };
        let is_lone = placement.owner(shard) == self.server && placement.replica(shard).is_none();
        is_lone || progress.lent.is_some() || placement.handovers.iter().any(is_awaited)
    }

    pub(super) fn broken_at(&self, shard: ShardId, block: BlockId) -> Refusal {
        Refusal::broken((&self.spec, &self.layout), shard, block, false)
    }
}
