//! The same bytes as an update, without its arithmetic: in the same shards and blocks, on the same threads, with the
//! same kind of stores.

use longshore_engine::{memory::Traffic, threads::Pool};

use super::update::{Arrays, BLOCK, Shape};

/// Moves what one update of all parameters moves.
pub(super) fn pass(arrays: &mut Arrays, pool: &Pool, shape: Shape) {
    for shard in &mut arrays.shards {
        let Shape { gradient, state, image } = shape;
        let blocks = shard.len / BLOCK;
        let mut read = shard.gradient.bytes().chunks(BLOCK * gradient);
        let [mut master, mut first, mut second] = [&mut shard.master, &mut shard.first, &mut shard.second]
            .into_iter()
            .zip(state)
            // An unused slot gives no chunks, and then empty ones.
            .map(|(region, bytes)| region.bytes_mut()[..shard.len * bytes].chunks_mut((BLOCK * bytes).max(1)))
            .collect::<Vec<_>>()
            .try_into()
            .unwrap_or_else(|_| unreachable!("three arrays are zipped"));
        let mut write = shard.image.bytes_mut().chunks_mut(BLOCK * image);
        let items = (0..blocks).map(|_| Traffic {
            read: read.next().unwrap_or_default(),
            update: [&mut master, &mut first, &mut second].map(|chunks| chunks.next().unwrap_or_default()),
            write: write.next().unwrap_or_default(),
        });
        pool.blocks(items.collect(), |block: Traffic<'_>| block.run(BLOCK));
    }
}
