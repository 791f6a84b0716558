//! The limit of an update: the same bytes without arithmetic. Shards, blocks, threads and the kind of stores are
//! the same.

use longshore_engine::{memory::Traffic, threads::ThreadPool};

use super::arrays::{Arrays, BLOCK, Shape};

/// Moves the bytes of one update of all parameters.
pub(super) fn pass(arrays: &mut Arrays, pool: &ThreadPool, shape: Shape) {
    for shard in &mut arrays.shards {
        let (gradient, state, image) = shard.cut(shape);
        let wire = BLOCK * shape.wire.bytes() as usize;
        let blocks = gradient.chunks(wire).zip(state.blocks()).zip(image.chunks_mut(wire));
        let items = blocks.map(|((read, state), write)| Traffic { read, update: state.arrays, write });
        pool.blocks(items.collect(), |block: Traffic<'_>| block.run(BLOCK));
    }
}
