//! Copies of blocks during their change, made by the update threads. Recovery puts back the copies of a killed process.

use std::sync::{
    PoisonError,
    atomic::{Ordering, fence},
};

use longshore_proto::{Fault, Version};

use super::{IMAGE_SUM, ShmTier, records::damaged};
use crate::{
    ids::OwnedShard,
    lock,
    memory::Region,
    record::KeptShard,
    threads::ThreadPool,
    tier::{
        contract::Tier,
        record::nonzero_crc64,
        state::{Guard, StateRef, Turn},
    },
};

pub(super) struct Undo<'a> {
    pub(super) tier: &'a ShmTier,
    pub(super) first_block: usize,
    pub(super) version: Version,
}

impl ShmTier {
    pub(super) fn undo_blocks(&self) -> Result<(), Fault> {
        for (slot, copy) in lock(&self.undo).iter() {
            let [held, version] = [0, 1].map(|word| self.undo_words(*slot)[word].load(Ordering::Acquire));
            let Some(block) = (held as usize).checked_sub(1) else { continue };
            if self.block(block).load(Ordering::Acquire) < version {
                let owned = OwnedShard(self.blocks.partition_point(|&first| first <= block) - 1);
                let index = block - self.blocks[owned.index()];
                self.memory.load(owned, &mut |state| {
                    let mut rest = copy.bytes();
                    for array in state.blocks().nth(index).map(|block| block.arrays).into_iter().flatten() {
                        let (part, after) = rest.split_at(array.len());
                        array.copy_from_slice(part);
                        rest = after;
                    }
                })?;
            }
            self.undo_words(*slot)[0].store(0, Ordering::Release);
        }
        Ok(())
    }

    /// Compares the blocks of the shards that are here with their checksums.
    pub(super) fn check_blocks(&self, kept: &[Option<KeptShard>], pool: &ThreadPool) -> Result<(), Fault> {
        for (owned, _) in self.shards().zip(kept).filter(|(_, kept)| kept.is_some_and(|kept| !kept.awaited)) {
            let mut found = Vec::new();
            self.memory.read(owned, &mut |state| {
                let blocks = self.blocks_of(owned).enumerate().collect();
                found = pool.blocks(blocks, |(index, block): (usize, usize)| {
                    let version = self.block(block).load(Ordering::Acquire);
                    let kept = self.block_sums(block)[(version % 2) as usize].load(Ordering::Acquire);
                    (kept != 0 && kept != nonzero_crc64(state.block(index).arrays)).then_some(block)
                });
            })?;
            if let Some(block) = found.into_iter().flatten().next() {
                return Err(damaged(&self.folder.path.join("state"), &format!("block {block} of it")));
            }
        }
        Ok(())
    }

    fn take_undo(&self) -> (usize, Region) {
        let mut free = lock(&self.undo);
        loop {
            if let Some(slot) = free.pop() {
                return slot;
            }
            free = self.undo_freed.wait(free).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Guard for Undo<'_> {
    fn begin(&self, block: usize, state: StateRef<'_>) -> Turn {
        let block = self.first_block + block;
        if self.tier.block(block).load(Ordering::Acquire) >= self.version.0 {
            return Turn::Done;
        }
        let (slot, mut copy) = self.tier.take_undo();
        let mut target = copy.bytes_mut();
        for array in state.arrays {
            let (part, rest) = target.split_at_mut(array.len());
            part.copy_from_slice(array);
            target = rest;
        }
        *lock(&self.tier.undo_held[slot]) = Some(copy);
        // Release: the copy is whole before the slot names the block, and the slot names the block before the block
        // changes.
        self.tier.undo_words(slot)[1].store(self.version.0, Ordering::Release);
        self.tier.undo_words(slot)[0].store(block as u64 + 1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        Turn::Go(slot)
    }

    fn end(&self, block: usize, slot: usize, state: StateRef<'_>, image: &[u8]) {
        let (sums, parity) = (self.tier.block_sums(self.first_block + block), (self.version.0 % 2) as usize);
        sums[parity].store(nonzero_crc64(state.arrays), Ordering::Relaxed);
        sums[IMAGE_SUM + parity].store(nonzero_crc64([image]), Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.tier.block(self.first_block + block).store(self.version.0, Ordering::SeqCst);
        self.tier.undo_words(slot)[0].store(0, Ordering::SeqCst);
        if let Some(copy) = lock(&self.tier.undo_held[slot]).take() {
            lock(&self.tier.undo).push((slot, copy));
            self.tier.undo_freed.notify_one();
        }
    }
}
