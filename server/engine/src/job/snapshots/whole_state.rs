//! A checkpoint's copy of a block: master weights and moments, and in a delayed job its images.

use std::sync::Arc;

use longshore_proto::{Fault, FaultKind, Version};

use super::{
    super::{Job, compute::BLOCK},
    Captured, Snapshot,
    purpose::Purpose,
};
use crate::tier::Shape;

/// Layout of a block's copy: the arrays one after the other, then room for the older image, which may stay
/// unfilled.
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
    /// If the piece has no older image, these bytes mean nothing.
    pub older_image: &'a [u8],
}

impl BlockCopy {
    fn of(job: &Job) -> BlockCopy {
        let image = if job.spec.max_delay >= 1 { BLOCK * job.spec.image_dtype.bytes() as usize } else { 0 };
        let [frozen, ..] = Shape::of_frozen(&job.spec).block();
        BlockCopy { state: Shape::of(&job.spec).block(), image, frozen }
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

impl Job {
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
}
