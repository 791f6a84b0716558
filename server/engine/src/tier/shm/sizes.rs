//! Sizes in bytes of the files of a `shm` job, and of their sections.

use longshore_proto::{JobSpec, Layout, ShardId};

use super::{BLOCK, SETTLED_WORDS, SHARD_WORDS, SUM_WORDS, UNDO_SLOTS, UNDO_WORDS};
use crate::{
    memory::Slab,
    tier::{memory::MemoryTier, record::RECORD_BYTES, state::Shape},
};

/// The sizes of the files, and of the sections of `progress`.
pub(in crate::tier) struct Sizes {
    pub(in crate::tier) state: usize,
    pub(in crate::tier) buffers: usize,
    pub(in crate::tier) progress: Vec<usize>,
    pub(super) lengths: Vec<usize>,
    pub(super) shapes: Vec<Shape>,
    /// Index of each shard's first block; one more at the end.
    pub(in crate::tier) blocks: Vec<usize>,
}

/// Returns the bytes of the tmpfs that are used beside the state and the job's buffers.
pub(in crate::tier) fn overhead(spec: &JobSpec, layout: &Layout, owned: &[ShardId]) -> u64 {
    Slab::bytes_for(Sizes::new(spec, layout, owned, 0).progress) as u64
}

impl Sizes {
    pub(in crate::tier) fn new(spec: &JobSpec, layout: &Layout, owned: &[ShardId], buffers: usize) -> Sizes {
        let lengths: Vec<usize> = owned.iter().map(|&shard| layout.shard_len(shard) as usize).collect();
        let mut blocks = vec![0];
        for length in &lengths {
            blocks.push(blocks[blocks.len() - 1] + length / BLOCK);
        }
        let shapes = Shape::of_shards(spec, layout, owned);
        let ranks = spec.world_size as usize;
        let words = lengths.len() * SHARD_WORDS + blocks[lengths.len()] + UNDO_SLOTS * UNDO_WORDS + ranks;
        let mut progress = vec![2 * RECORD_BYTES, words * 8];
        progress.extend(vec![Shape::of(spec).bytes(BLOCK); UNDO_SLOTS]);
        progress.push(ranks * 8);
        progress.push(2 * SETTLED_WORDS * 8);
        progress.push(blocks[lengths.len()] * SUM_WORDS * 8);
        let state = MemoryTier::bytes(&lengths, &shapes);
        Sizes { state, buffers, progress, lengths, shapes, blocks }
    }

    /// Returns the bytes of a `progress` file of release 0.1: without the versions at which ranks had joined, which then
    /// read as 0, without settled steps and without checksums.
    pub(super) fn least_progress(&self) -> usize {
        Slab::bytes_for(self.progress[..self.progress.len() - 3].iter().copied())
    }
}
