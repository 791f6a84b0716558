//! The `memory` tier: state in anonymous huge pages. The state is lost with the process; the last checkpoint remains.
//!
//! A shard with a second holder has a checksum of each block. An update compares the block just before the change,
//! while the block comes into cache anyway, and stores the next checksum just after. So a flipped bit is found before
//! it spreads, and the other holder goes on with the shard.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicU64, Ordering},
};

use longshore_proto::{Fault, Version, limits::BLOCK_ELEMENTS};

use super::{
    Guard, Guarded, Inputs, Opened, Recovered, Shape, StateMut, StateRef, Store, Tier, Turn,
    record::nonzero_crc64,
};
use crate::{
    admission::exhausted,
    ids::OwnedShard,
    lock,
    memory::{AllocationError, Region, Slab},
    threads::ThreadPool,
};

/// Largest number of shards that are updated together. After each group the threads wait 40 us for each other; a
/// shard's update takes 2 ms.
const MOST_AT_ONCE: usize = 8;

pub(super) struct MemoryTier {
    shapes: Vec<Shape>,
    shards: Vec<Mutex<Shard>>,
    /// Checksum of each block's state, by owned shard and block; 0 where none is known. Empty without replicas, since
    /// only a replica could heal a shard.
    sums: Vec<Sums>,
}

/// The checksums of one shard.
type Sums = Box<[AtomicU64]>;
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
    let mut tier = MemoryTier::over(slab, &lengths, shapes, &used, pool).map_err(exhausted)?;
    if inputs.spec.replicas > 1 {
        let blocks = lengths.iter().map(|&length| length / BLOCK_ELEMENTS as usize);
        tier.sums = blocks.map(|blocks| (0..blocks).map(|_| AtomicU64::new(0)).collect()).collect();
    }
    let store = Store::of(Arc::new(tier));
    Ok(Opened { store, buffers: None, recovered: Recovered::Nothing })
}

impl MemoryTier {
    pub(super) fn bytes(lengths: &[usize], shapes: &[Shape]) -> usize {
        Slab::bytes_for(sizes(lengths, shapes))
    }

    /// `lengths` has the elements of each shard, and `shapes` the layout of its arrays. Shards that are `used` are
    /// touched. `pool` will update the shards.
    pub(super) fn over(
        slab: Slab,
        lengths: &[usize],
        shapes: Vec<Shape>,
        used: &[bool],
        pool: &ThreadPool,
    ) -> Result<MemoryTier, AllocationError> {
        let regions = slab.carve_touching(&sizes(lengths, &shapes), |region| used[region / 3], pool)?;
        let mut regions = regions.into_iter();
        let mut shards = Vec::with_capacity(shapes.len());
        while let (Some(master), Some(first), Some(second)) = (regions.next(), regions.next(), regions.next())
        {
            shards.push(Mutex::new([master, first, second]));
        }
        let sums = shapes.iter().map(|_| Sums::default()).collect();
        Ok(MemoryTier { shapes, shards, sums })
    }
}

impl Guard for Sums {
    fn begin(&self, block: usize, state: StateRef<'_>) -> Turn {
        match self.get(block).map(|kept| kept.load(Ordering::Relaxed)) {
            Some(kept) if kept != 0 && kept != nonzero_crc64(state.arrays) => Turn::Damaged,
            _ => Turn::Go(0),
        }
    }

    fn end(&self, block: usize, _: usize, state: StateRef<'_>, _: &[u8]) {
        self.get(block)
            .into_iter()
            .for_each(|kept| kept.store(nonzero_crc64(state.arrays), Ordering::Relaxed));
    }
}

/// The sizes of the regions. A shard's arrays are neighbours, since an update walks all three at once.
fn sizes(lengths: &[usize], shapes: &[Shape]) -> Vec<usize> {
    lengths.iter().zip(shapes).flat_map(|(&length, shape)| shape.arrays(length)).collect()
}

impl Tier for MemoryTier {
    fn load(&self, owned: OwnedShard, load: &mut dyn FnMut(StateMut<'_>)) -> Result<(), Fault> {
        let mut shard = lock(&self.shards[owned.index()]);
        self.sums[owned.index()].iter().for_each(|kept| kept.store(0, Ordering::Relaxed));
        load(StateMut::new(self.shapes[owned.index()], shard.each_mut().map(Region::bytes_mut)));
        Ok(())
    }

    fn read(&self, owned: OwnedShard, read: &mut dyn FnMut(StateRef<'_>)) -> Result<(), Fault> {
        let shard = lock(&self.shards[owned.index()]);
        let state = StateRef::new(self.shapes[owned.index()], shard.each_ref().map(Region::bytes));
        read(state.guarded(&self.sums[owned.index()]));
        Ok(())
    }

    fn seal(&self, owned: OwnedShard, _: Version, _: Version) -> Result<(), Fault> {
        let (shard, sums) = (lock(&self.shards[owned.index()]), &self.sums[owned.index()]);
        let state = StateRef::new(self.shapes[owned.index()], shard.each_ref().map(Region::bytes));
        (0..sums.len()).for_each(|block| sums.end(block, 0, state.block(block), &[]));
        Ok(())
    }

    fn make_room(&self, owned: OwnedShard) -> Result<(), Fault> {
        lock(&self.shards[owned.index()]).iter().try_for_each(Region::reserve).map_err(exhausted)
    }

    fn release(&self, owned: OwnedShard) {
        for region in lock(&self.shards[owned.index()]).iter_mut() {
            if let Err(error) = region.give_back() {
                tracing::debug!(%error, "memory of a shard stays");
            }
        }
    }

    fn most_at_once(&self) -> usize {
        MOST_AT_ONCE
    }

    fn update(
        &self,
        run: &[OwnedShard],
        _version: Version,
        update: &mut dyn FnMut(Vec<Guarded<'_>>),
    ) -> Result<(), Fault> {
        let mut shards: Vec<_> = run.iter().map(|owned| lock(&self.shards[owned.index()])).collect();
        let states = shards.iter_mut().zip(run).map(|(shard, owned)| {
            let state = StateMut::new(self.shapes[owned.index()], shard.each_mut().map(Region::bytes_mut));
            (state, &self.sums[owned.index()] as &dyn Guard)
        });
        update(states.collect());
        Ok(())
    }
}
