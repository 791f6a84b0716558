//! The three kinds of snapshot. An export has a version's weights in any element format, or its whole state. A state
//! hash has the hash of each block, which also protects a checkpoint's bytes. A checkpoint has the state, and in a
//! delayed job images.

use std::{sync::Arc, time::Instant};

use longshore_proto::{BlockId, Dtype, Fault, FaultKind, StateArray, Version, checksum::BlockHash};

use super::{
    super::{Job, compute::BLOCK},
    Captured, Purpose, Snapshot, SnapshotInfo,
};
use crate::{
    kernels::{ImageMut, cast},
    tier::{Shape, StateRef},
};

/// Contents of an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exported {
    /// The master weights, rounded to this format.
    Weights(Dtype),
    /// Every array that the rule has, in fp32.
    State,
}

impl Exported {
    /// The elements' format.
    pub fn dtype(self) -> Dtype {
        match self {
            Exported::Weights(dtype) => dtype,
            Exported::State => Dtype::F32,
        }
    }

    /// The arrays in a block's copy, one after the other. A frozen shard has only the first.
    pub fn arrays(self, job: &Job) -> &'static [StateArray] {
        match self {
            Exported::Weights(_) => &[StateArray::Master],
            Exported::State => StateArray::of(job.share.spec.rule),
        }
    }
}

/// Layout of a block's copy: the state's arrays, the image, then room for the older image, which may stay unfilled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockCopy {
    state: [usize; 3],
    /// Bytes of each image; 0 where none is kept.
    image: usize,
    /// Bytes of the weights of a frozen shard, which has no other state.
    frozen: usize,
}

/// Parts of a block's copy.
pub struct CopiedBlock<'a> {
    /// All of the state, in the order in which its hash takes it.
    pub whole: &'a [u8],
    /// Master weights, first and second moments.
    pub state: [&'a [u8]; 3],
    pub image: &'a [u8],
    /// Undefined if the piece has no older image.
    pub older_image: &'a [u8],
}

impl BlockCopy {
    fn of(job: &Job) -> BlockCopy {
        let image = if job.share.spec.max_delay >= 1 {
            BLOCK * job.share.spec.image_dtype.bytes() as usize
        } else {
            0
        };
        let [frozen, ..] = Shape::of_frozen(&job.share.spec).block();
        BlockCopy { state: Shape::of(&job.share.spec).block(), image, frozen }
    }

    fn bytes(&self) -> usize {
        self.frozen.max(self.state.iter().sum::<usize>() + 2 * self.image)
    }

    /// Cuts the copy of a block of a shard that is trained, or is `frozen`.
    pub fn cut<'a>(&self, block: &'a [u8], frozen: bool) -> CopiedBlock<'a> {
        if frozen {
            let whole = &block[..self.frozen];
            return CopiedBlock { whole, state: [whole, &[], &[]], image: &[], older_image: &[] };
        }
        let block = &block[..self.state.iter().sum::<usize>() + 2 * self.image];
        let (whole, images) = block.split_at(self.state.iter().sum());
        let (master, moments) = whole.split_at(self.state[0]);
        let (first, second) = moments.split_at(self.state[1]);
        let (image, older_image) = images.split_at(self.image);
        CopiedBlock { whole, state: [master, first, second], image, older_image }
    }

    fn fill(&self, captured: &Captured<'_>, block: usize, place: &mut [u8]) {
        let of_block = block * self.image..(block + 1) * self.image;
        let parts = captured.state.block(block).arrays;
        let images = [Some(captured.image), captured.older_image];
        let mut rest = place;
        for part in parts {
            let (target, after) = rest.split_at_mut(part.len());
            target.copy_from_slice(part);
            rest = after;
        }
        if captured.state.is_frozen() {
            return;
        }
        for whole in images {
            let (target, after) = rest.split_at_mut(self.image);
            if let Some(part) = whole.and_then(|whole| whole.get(of_block.clone())) {
                target.copy_from_slice(part);
            }
            rest = after;
        }
    }
}

/// Hashes a block of state, its arrays one after the other.
fn hash_state(block: StateRef<'_>) -> BlockHash {
    let mut hasher = blake3::Hasher::new();
    for bytes in block.arrays {
        hasher.update(bytes);
    }
    *hasher.finalize().as_bytes()
}

impl Job {
    /// Begins an export of every owned shard at a version, little-endian. Shards come in any order. A future version is
    /// waited for; None means the current one.
    pub fn begin_export(
        self: &Arc<Self>,
        version: Option<Version>,
        exported: Exported,
    ) -> Result<Snapshot, Fault> {
        let (isa, rule) = (self.compute.isa(), self.share.spec.rule);
        let (arrays, dtype) = (exported.arrays(self), exported.dtype());
        let array_bytes = BLOCK * dtype.bytes() as usize;
        let copy = move |captured: &Captured<'_>, block: usize, place: &mut [u8]| {
            let has = |array: &StateArray| array.index() == 0 || !captured.state.is_frozen();
            let arrays = arrays.iter().filter(|array| has(array));
            for (&array, place) in arrays.zip(place.chunks_exact_mut(array_bytes)) {
                captured.state.with_array(isa, rule, array, block, |values| match dtype {
                    Dtype::F32 => cast(isa, values, ImageMut::F32(bytemuck::cast_slice_mut(place))),
                    Dtype::F16 => cast(isa, values, ImageMut::F16(bytemuck::cast_slice_mut(place))),
                    Dtype::Bf16 => cast(isa, values, ImageMut::Bf16(bytemuck::cast_slice_mut(place))),
                });
            }
        };
        self.begin_snapshot(version, Purpose::Export, arrays.len() * array_bytes, Box::new(copy))
    }

    /// Begins a snapshot of the whole state of a version, for a checkpoint. None means the current version; a
    /// future one is waited for.
    pub fn begin_checkpoint(
        self: &Arc<Self>,
        version: Option<Version>,
    ) -> Result<(Snapshot, BlockCopy), Fault> {
        if version.is_none_or(|version| version == Version(0))
            && !self.protocol.machine().filled_without().is_empty()
        {
            let limit =
                "at least 1 in a job that is filled with state which lacks updates of some parameters";
            return Err(Fault::new(FaultKind::Precondition, "version", 0, limit, "make a step first"));
        }
        let layout = BlockCopy::of(self);
        let copy = move |captured: &Captured<'_>, block: usize, place: &mut [u8]| {
            layout.fill(captured, block, place);
        };
        let snapshot = self.begin_snapshot(version, Purpose::Checkpoint, layout.bytes(), Box::new(copy))?;
        Ok((snapshot, layout))
    }

    /// The hashes of every block of a captured shard, computed on the update threads.
    pub fn hash_blocks(&self, captured: &Captured<'_>) -> Vec<(BlockId, BlockHash)> {
        let first = self.share.layout.shard_blocks(captured.shard).start;
        let blocks = (0..captured.state.blocks()).collect();
        self.compute.blocks(blocks, |block: usize| {
            (BlockId(first + block as u32), hash_state(captured.state.block(block)))
        })
    }

    /// The BLAKE3 of each block of an image, computed on the update threads.
    pub fn hash_image(&self, image: &[u8]) -> Vec<BlockHash> {
        let blocks = image.chunks(BLOCK * self.share.spec.image_dtype.bytes() as usize).collect();
        self.compute.blocks(blocks, |block: &[u8]| *blake3::hash(block).as_bytes())
    }

    /// Returns the current version and its block hashes, in block order. A snapshot computes the hashes: its copy of a
    /// block is the block's hash.
    pub fn state_hashes(
        self: &Arc<Self>,
        deadline: Instant,
    ) -> Result<(SnapshotInfo, Vec<(BlockId, BlockHash)>), Fault> {
        let copy = |captured: &Captured<'_>, block: usize, place: &mut [u8]| {
            place.copy_from_slice(&hash_state(captured.state.block(block)));
        };
        let snapshot = self.begin_snapshot(None, Purpose::Hash, size_of::<BlockHash>(), Box::new(copy))?;
        let layout = Arc::clone(&self.share.layout);
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
