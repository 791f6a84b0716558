//! Bits that flipped in this server's memory. Reads of the state find them, and rank 0 hears of them with a step's
//! statistics. Only jobs with replicas look for flipped bits.

use std::{ops::Range, sync::atomic::Ordering};

use longshore_proto::{Fault, ShardId};

use super::Job;
use crate::{ids::OwnedShard, step::Refusal};

impl Job {
    /// The shards whose state is broken here.
    pub fn broken(&self) -> Vec<ShardId> {
        self.protocol.machine().broken()
    }

    /// Number of shards whose state has broken here since the job was opened.
    pub fn broken_so_far(&self) -> u64 {
        self.broken.load(Ordering::Relaxed)
    }

    /// Flips a bit of a shard's state in memory, as a bad memory module does.
    #[doc(hidden)]
    pub fn flip_bit_for_tests(&self, shard: ShardId, bit: usize) {
        let machine = self.protocol.machine();
        let (owned, version) =
            (machine.owned_index(shard).expect("a shard of this server"), machine.version());
        let flipped = self.tier.state.update(&[owned], version, &mut |states| {
            let arrays = states.into_iter().flat_map(|(state, _)| state.arrays);
            let mut arrays: Vec<&mut [u8]> = arrays.filter(|array| !array.is_empty()).collect();
            let of = bit % arrays.len();
            let at = bit / arrays.len() % (8 * arrays[of].len());
            arrays[of][at / 8] ^= 1 << (at % 8);
        });
        assert_eq!(flipped, Ok(()));
    }

    /// Compares blocks of a shard with their checksums, where the tier has some.
    ///
    /// # Errors
    /// `Corrupt` for a block that differs.
    pub(super) fn check_blocks(&self, owned: OwnedShard, mut blocks: Range<usize>) -> Result<(), Fault> {
        if self.share.spec.replicas == 1 {
            return Ok(());
        }
        let mut broken = None;
        self.tier.state.read(owned, &mut |state| broken = blocks.find(|&block| !state.is_whole(block)))?;
        broken.map_or(Ok(()), |block| Err(self.found_broken(owned, block)?))
    }

    /// Marks the shard of a block that differs from its checksum as broken. Returns the shard's refusal.
    ///
    /// # Errors
    /// If no other server can go on with the shard, which ends the job here.
    pub(super) fn found_broken(&self, owned: OwnedShard, block: usize) -> Result<Fault, Fault> {
        let shard = self.share.shard(owned);
        let block = self.share.block(owned, block);
        let (is_new, fault) = {
            let mut machine = self.protocol.machine();
            let (is_new, refusal) = machine.broke(owned, block);
            (is_new, Fault::from(refusal))
        };
        if is_new {
            self.broken.fetch_add(1, Ordering::Relaxed);
            tracing::error!(job = %self.share.spec.name, %shard, %block, %fault, "the shard's other holder goes on with it");
        }
        self.check_reparable()?;
        self.protocol.notify();
        Ok(fault)
    }

    /// Ends the job here if no other server has the state of a broken shard.
    pub(super) fn check_reparable(&self) -> Result<(), Fault> {
        if self.share.spec.replicas == 1 {
            return Ok(());
        }
        let irreparable: Option<Refusal> = self.protocol.machine().irreparable();
        irreparable.map_or(Ok(()), |refusal| Err(self.protocol.fail(refusal.into())))
    }
}
