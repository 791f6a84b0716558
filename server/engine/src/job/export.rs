//! The weights of one version in the format that a reader wants, chunk by chunk, while training goes on.

use std::{sync::Arc, time::Instant};

use longshore_proto::{Dtype, Fault, ShardId, Version, limits::CHUNK_BYTES};

use super::{Captured, Job, SnapshotInfo, compute::BLOCK};
use crate::kernels::{ImageMut, cast};

/// A piece of one shard's weights.
pub struct Exported<'a> {
    pub shard: ShardId,
    /// Elements from the shard's start.
    pub offset: u64,
    /// At most a chunk, little-endian.
    pub bytes: &'a [u8],
}

impl Job {
    /// Hands the master weights of a version, rounded to `dtype`, to `sink`: every owned shard's, in no order. The version
    /// is as in [`Job::snapshot`]. Until `sink` returns, updates of that shard wait.
    pub fn export(
        self: &Arc<Self>,
        version: Option<Version>,
        dtype: Dtype,
        deadline: Instant,
        sink: impl Fn(Exported<'_>) -> Result<(), Fault> + Send + Sync + 'static,
    ) -> Result<SnapshotInfo, Fault> {
        let isa = self.compute().isa();
        let capture = move |_: usize, captured: Captured<'_>| {
            // As f32, so that it is aligned for every format.
            let (mut words, block_words) = (vec![0f32; CHUNK_BYTES / 4], BLOCK * dtype.bytes() as usize / 4);
            let (blocks, in_chunk) = (captured.state.blocks(), words.len() / block_words);
            for first in (0..blocks).step_by(in_chunk) {
                let words = &mut words[..in_chunk.min(blocks - first) * block_words];
                for (index, words) in words.chunks_mut(block_words).enumerate() {
                    captured.state.with_master(isa, first + index, |master| match dtype {
                        Dtype::F32 => cast(isa, master, ImageMut::F32(words)),
                        Dtype::F16 => cast(isa, master, ImageMut::F16(bytemuck::cast_slice_mut(words))),
                        Dtype::Bf16 => cast(isa, master, ImageMut::Bf16(bytemuck::cast_slice_mut(words))),
                    });
                }
                let offset = (first * BLOCK) as u64;
                sink(Exported { shard: captured.shard, offset, bytes: bytemuck::cast_slice(words) })?;
            }
            Ok(())
        };
        self.snapshot(version, deadline, Box::new(capture))
    }
}
