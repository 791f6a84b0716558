//! Hashes of blocks. State hashes are made of them, and they protect a checkpoint's bytes.

use std::{sync::Arc, time::Instant};

use longshore_proto::{BlockId, Fault, checksum::BlockHash};

use super::{
    super::{Job, compute::BLOCK},
    Captured, SnapshotInfo,
    purpose::Purpose,
};
use crate::tier::StateRef;

/// Hashes a block of state, its arrays one after the other.
fn hash_state(block: StateRef<'_>) -> BlockHash {
    let mut hasher = blake3::Hasher::new();
    for bytes in block.arrays {
        hasher.update(bytes);
    }
    *hasher.finalize().as_bytes()
}

impl Job {
    /// The hashes of every block of a captured shard, computed on the update threads.
    pub fn hash_blocks(&self, captured: &Captured<'_>) -> Vec<(BlockId, BlockHash)> {
        let first = self.layout.shard_blocks(captured.shard).start;
        let blocks = (0..captured.state.blocks()).collect();
        self.compute.blocks(blocks, |block: usize| {
            (BlockId(first + block as u32), hash_state(captured.state.block(block)))
        })
    }

    /// The BLAKE3 of each block of an image, computed on the update threads.
    pub fn hash_image(&self, image: &[u8]) -> Vec<BlockHash> {
        let blocks = image.chunks(BLOCK * self.spec.image_dtype.bytes() as usize).collect();
        self.compute.blocks(blocks, |block: &[u8]| *blake3::hash(block).as_bytes())
    }

    /// Returns the block hashes of the current version, in block order, and that version. A snapshot computes
    /// them: its copy of a block is the block's hash.
    pub fn state_hashes(
        self: &Arc<Self>,
        deadline: Instant,
    ) -> Result<(SnapshotInfo, Vec<(BlockId, BlockHash)>), Fault> {
        let copy = |captured: &Captured<'_>, block: usize, place: &mut [u8]| {
            place.copy_from_slice(&hash_state(captured.state.block(block)));
        };
        let snapshot = self.begin_snapshot(None, Purpose::Hash, size_of::<BlockHash>(), Box::new(copy))?;
        let layout = Arc::clone(&self.layout);
        let mut hashes = Vec::new();
        let info = snapshot.run(deadline, |piece| {
            let first = layout.shard_blocks(piece.shard).start + piece.first as u32;
            let (found, _) = piece.bytes().as_chunks::<{ size_of::<BlockHash>() }>();
            hashes.extend((first..).map(BlockId).zip(found.iter().copied()));
            Ok(())
        })?;
        hashes.sort_by_key(|(block, _)| *block);
        Ok((info, hashes))
    }
}
