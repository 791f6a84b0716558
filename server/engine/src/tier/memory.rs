//! The `memory` tier: state in anonymous huge pages. State is lost with the process, and the last checkpoint
//! remains.

use std::sync::{Arc, Mutex};

use longshore_proto::{Fault, Version};

use super::{
    Guard, Inputs, Opened, Recovered, Shape, StateMut, StateRef, Store, Tier, Together, Unguarded,
    fault::exhausted,
};
use crate::{
    ids::OwnedShard,
    lock,
    memory::{AllocationError, Region, Slab},
    threads::ThreadPool,
};

pub(super) struct MemoryTier {
    shapes: Vec<Shape>,
    shards: Vec<Mutex<Shard>>,
}

type Shard = [Region; 3];

pub(super) fn open(inputs: &Inputs<'_>, pool: &ThreadPool) -> Result<Opened, Fault> {
    let lengths: Vec<usize> =
        inputs.owned.iter().map(|&shard| inputs.layout.shard_len(shard) as usize).collect();
    let shapes = Shape::of_shards(inputs.spec, inputs.layout, inputs.owned);
    let used: Vec<bool> =
        inputs.owned.iter().map(|&shard| inputs.placement.holds(inputs.server, shard)).collect();
    let sizes = sizes(&lengths, &shapes);
    let touched = sizes.iter().zip(used.iter().flat_map(|used| [used; 3])).filter(|(_, used)| **used);
    let bytes = [Slab::bytes_for(sizes.iter().copied()), Slab::bytes_for(touched.map(|(size, _)| *size))];
    let slab = Slab::allocate_sparse(bytes[0], bytes[1]).map_err(exhausted)?;
    let regions = slab.carve_touching(&sizes, |region| used[region / 3], pool).map_err(exhausted)?;
    let tier = Arc::new(MemoryTier::of(regions, shapes));
    let store = Store { together: Some(tier.clone()), ..Store::of(tier) };
    Ok(Opened { store, buffers: None, recovered: Recovered::Nothing })
}

impl MemoryTier {
    pub(super) fn bytes(lengths: &[usize], shapes: &[Shape]) -> usize {
        Slab::bytes_for(sizes(lengths, shapes))
    }

    /// `lengths` has the elements of each owned shard, and `shapes` the layout of its arrays. `pool` will update
    /// the shards.
    pub(super) fn over(
        slab: Slab,
        lengths: &[usize],
        shapes: Vec<Shape>,
        pool: &ThreadPool,
    ) -> Result<MemoryTier, AllocationError> {
        Ok(MemoryTier::of(slab.carve(&sizes(lengths, &shapes), pool)?, shapes))
    }

    /// `regions` has three arrays for each shard.
    fn of(regions: Vec<Region>, shapes: Vec<Shape>) -> MemoryTier {
        let mut regions = regions.into_iter();
        let mut shards = Vec::with_capacity(shapes.len());
        while let (Some(master), Some(first), Some(second)) = (regions.next(), regions.next(), regions.next())
        {
            shards.push(Mutex::new([master, first, second]));
        }
        MemoryTier { shapes, shards }
    }
}

/// The sizes of the regions. A shard's arrays lie beside each other, since an update walks all three at once.
fn sizes(lengths: &[usize], shapes: &[Shape]) -> Vec<usize> {
    lengths.iter().zip(shapes).flat_map(|(&length, shape)| shape.arrays(length)).collect()
}

impl Tier for MemoryTier {
    fn load(&self, owned: OwnedShard, load: &mut dyn FnMut(StateMut<'_>)) -> Result<(), Fault> {
        let mut shard = lock(&self.shards[owned.index()]);
        load(StateMut::new(self.shapes[owned.index()], shard.each_mut().map(Region::bytes_mut)));
        Ok(())
    }

    fn read(&self, owned: OwnedShard, read: &mut dyn FnMut(StateRef<'_>)) -> Result<(), Fault> {
        let shard = lock(&self.shards[owned.index()]);
        read(StateRef::new(self.shapes[owned.index()], shard.each_ref().map(Region::bytes)));
        Ok(())
    }

    fn release(&self, owned: OwnedShard) {
        for region in lock(&self.shards[owned.index()]).iter_mut() {
            if let Err(error) = region.give_back() {
                tracing::debug!(%error, "memory of a shard stays");
            }
        }
    }

    fn update(
        &self,
        owned: OwnedShard,
        _version: Version,
        update: &mut dyn FnMut(StateMut<'_>, &dyn Guard),
    ) -> Result<(), Fault> {
        self.load(owned, &mut |state| update(state, &Unguarded))
    }
}

impl Together for MemoryTier {
    fn update_run(&self, run: &[OwnedShard], update: &mut dyn FnMut(Vec<StateMut<'_>>)) -> Result<(), Fault> {
        let mut shards: Vec<_> = run.iter().map(|owned| lock(&self.shards[owned.index()])).collect();
        let states = shards.iter_mut().zip(run).map(|(shard, owned)| {
            StateMut::new(self.shapes[owned.index()], shard.each_mut().map(Region::bytes_mut))
        });
        update(states.collect());
        Ok(())
    }
}
