//! The `memory` tier: state in anonymous huge pages. Lost with the process; the last checkpoint remains.

use std::sync::Mutex;

use longshore_proto::{Fault, TierKind, Version};

use super::{Guard, StateRef, Tier, Unguarded};
use crate::{
    kernels::State,
    lock,
    memory::{AllocationError, Region, Slab},
    threads::Pool,
};

pub struct MemoryTier {
    shards: Vec<Mutex<Shard>>,
}

struct Shard {
    master: Region,
    first: Region,
    second: Region,
}

impl MemoryTier {
    /// `lengths`: elements of each owned shard. `state_slots`: fp32 arrays beside the master weights, 0 to 2.
    pub fn allocate(
        lengths: &[usize],
        state_slots: usize,
        pool: &Pool,
    ) -> Result<MemoryTier, AllocationError> {
        let slab = Slab::allocate(MemoryTier::bytes(lengths, state_slots))?;
        MemoryTier::over(slab, lengths, state_slots, pool)
    }

    /// What `over` needs.
    pub(super) fn bytes(lengths: &[usize], state_slots: usize) -> usize {
        Slab::bytes_for(sizes(lengths, state_slots))
    }

    /// `pool`: what will update them.
    pub(super) fn over(
        slab: Slab,
        lengths: &[usize],
        state_slots: usize,
        pool: &Pool,
    ) -> Result<MemoryTier, AllocationError> {
        let mut regions = slab.carve(&sizes(lengths, state_slots), pool)?.into_iter();
        let mut shards = Vec::with_capacity(lengths.len());
        while let (Some(master), Some(first), Some(second)) = (regions.next(), regions.next(), regions.next())
        {
            shards.push(Mutex::new(Shard { master, first, second }));
        }
        Ok(MemoryTier { shards })
    }
}

/// A shard's arrays lie beside each other: an update walks all three at once.
fn sizes(lengths: &[usize], state_slots: usize) -> Vec<usize> {
    let slot = |index: usize, length: usize| if index < state_slots { length * 4 } else { 0 };
    lengths.iter().flat_map(|&length| [length * 4, slot(0, length), slot(1, length)]).collect()
}

impl Tier for MemoryTier {
    fn kind(&self) -> TierKind {
        TierKind::Memory
    }

    fn load(&self, owned: usize, load: &mut dyn FnMut(State<'_>)) -> Result<(), Fault> {
        let mut shard = lock(&self.shards[owned]);
        let Shard { master, first, second } = &mut *shard;
        load(State { master: master.f32_mut(), first: first.f32_mut(), second: second.f32_mut() });
        Ok(())
    }

    fn update(
        &self,
        owned: usize,
        _version: Version,
        update: &mut dyn FnMut(State<'_>, &dyn Guard),
    ) -> Result<(), Fault> {
        self.load(owned, &mut |state| update(state, &Unguarded))
    }

    fn read(&self, owned: usize, read: &mut dyn FnMut(StateRef<'_>)) -> Result<(), Fault> {
        let shard = lock(&self.shards[owned]);
        read(StateRef { master: shard.master.f32(), first: shard.first.f32(), second: shard.second.f32() });
        Ok(())
    }
}
