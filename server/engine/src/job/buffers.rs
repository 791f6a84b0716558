//! A job's DRAM beside its state: contributions, sums, figures and images.

use std::sync::{Mutex, RwLock};

use longshore_proto::{Dtype, JobSpec, Version};

use crate::{
    kernels::{Figures, Gradient, ImageMut},
    memory::{AllocationError, Region, Slab},
    threads::Pool,
};

/// By owned shard.
pub(super) struct Buffers {
    pub(super) shards: Vec<ShardBuffers>,
}

pub(super) struct ShardBuffers {
    /// By slot of the step, then rank; wire format.
    pub(super) contributions: Vec<Vec<Mutex<Region>>>,
    /// By slot; fp32. None where a step has one contribution, which is left as it came.
    pub(super) accumulators: Vec<Option<Mutex<Region>>>,
    /// By slot: the figures of each block once the step is complete.
    pub(super) figures: Vec<Mutex<Vec<Figures>>>,
    /// By version parity.
    pub(super) images: [RwLock<Image>; 2],
}

/// 16-bit (or fp32) weights of a shard, and the version they are of. None while nothing valid is in it.
pub(super) struct Image {
    pub(super) version: Option<Version>,
    pub(super) region: Region,
}

impl Buffers {
    /// What `over` needs.
    pub(super) fn bytes(spec: &JobSpec, lengths: &[usize]) -> usize {
        Slab::bytes_for(Buffers::sizes(spec, lengths))
    }

    fn sizes(spec: &JobSpec, lengths: &[usize]) -> Vec<usize> {
        let gradient = spec.gradient_dtype.bytes() as usize;
        let image = spec.image_dtype.bytes() as usize;
        let sum = if spec.accumulates() { 4 } else { 0 };
        let mut sizes = Vec::new();
        for &length in lengths {
            sizes.extend([length * image; 2]);
            for _ in 0..spec.gradient_slots() {
                sizes.extend(vec![length * gradient; spec.world_size as usize]);
                sizes.push(length * sum);
            }
        }
        sizes
    }

    /// `pool`: what will work on them.
    pub(super) fn over(
        slab: Slab,
        spec: &JobSpec,
        lengths: &[usize],
        pool: &Pool,
    ) -> Result<Buffers, AllocationError> {
        let (slots, ranks) = (spec.gradient_slots(), spec.world_size as usize);
        let mut regions = slab.carve(&Buffers::sizes(spec, lengths), pool)?.into_iter();
        let mut next = || regions.next().expect("one region was carved for each size");
        let shards = lengths.iter().map(|_| {
            let images = [(); 2].map(|()| RwLock::new(Image { version: None, region: next() }));
            let (mut contributions, mut accumulators) = (Vec::new(), Vec::new());
            for _ in 0..slots {
                contributions.push((0..ranks).map(|_| Mutex::new(next())).collect());
                let region = next();
                accumulators.push(spec.accumulates().then(|| Mutex::new(region)));
            }
            let figures = (0..slots).map(|_| Mutex::new(Vec::new())).collect();
            ShardBuffers { contributions, accumulators, figures, images }
        });
        Ok(Buffers { shards: shards.collect() })
    }
}

/// A wire-format region as kernels see it.
pub(super) fn gradient(region: &Region, dtype: Dtype) -> Gradient<'_> {
    match dtype {
        Dtype::F32 => Gradient::F32(region.f32()),
        Dtype::F16 => Gradient::F16(region.u16()),
        Dtype::Bf16 => Gradient::Bf16(region.u16()),
    }
}

/// An image region cut into blocks.
pub(super) fn image_blocks(region: &mut Region, dtype: Dtype, block: usize) -> Vec<ImageMut<'_>> {
    match dtype {
        Dtype::F32 => region.f32_mut().chunks_mut(block).map(ImageMut::F32).collect(),
        Dtype::F16 => region.u16_mut().chunks_mut(block).map(ImageMut::F16).collect(),
        Dtype::Bf16 => region.u16_mut().chunks_mut(block).map(ImageMut::Bf16).collect(),
    }
}
