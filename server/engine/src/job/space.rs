//! A job's DRAM beside its state: allocated in one piece or two, then cut into images, contributions and sums.

use std::sync::{Arc, Mutex, RwLock};

use longshore_proto::{JobSpec, Layout, ShardId};

use super::{
    gradients::{Contribution, ShardGradients},
    images::Image,
};
use crate::{
    ids::OwnedShards,
    memory::{AllocationError, AtomicWords, SharedFile, Slab},
    threads::ThreadPool,
    tier::Storage,
};

/// The buffers, by owned shard.
pub(super) struct Buffers {
    pub(super) images: Vec<[RwLock<Image>; 2]>,
    pub(super) gradients: Vec<ShardGradients>,
    /// The file that holds all images, if other processes may be given it.
    pub(super) shared: Option<SharedFile>,
}

/// The memory of a job's buffers, before it is cut.
pub(super) struct Space {
    slab: Slab,
    /// Images and version stamps, if other processes may map them. Otherwise `slab` has them.
    shared: Option<(Slab, SharedFile)>,
    widths: Widths,
}

/// Properties that decide the sizes of a shard's buffers.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    /// 0 for a frozen shard, which has no buffers.
    elements: usize,
    contributors: usize,
    /// True if contributions are summed.
    accumulates: bool,
}

impl Shape {
    pub(super) fn of(spec: &JobSpec, layout: &Layout, owned: &[ShardId]) -> Vec<Shape> {
        let shape = |&shard: &ShardId| {
            let contributors = layout.contributors(shard);
            Shape {
                elements: if layout.is_frozen(shard) { 0 } else { layout.shard_len(shard) as usize },
                contributors: contributors.len(),
                accumulates: spec.accumulates(contributors),
            }
        };
        owned.iter().map(shape).collect()
    }
}

/// Bytes of memory for each element of an image, a contribution and a sum. 0 for arrays that live on drives.
#[derive(Clone, Copy)]
struct Widths {
    image: usize,
    contribution: usize,
    sum: usize,
}

impl Widths {
    fn of(spec: &JobSpec) -> Widths {
        Widths {
            image: spec.image_dtype.bytes() as usize,
            contribution: spec.gradient_dtype.bytes() as usize,
            sum: size_of::<f32>(),
        }
    }
}

impl Space {
    /// Allocates the memory. If images are to be shared and the kernel allows it, other processes can be given theirs.
    pub(super) fn allocate(
        spec: &JobSpec,
        shapes: &[Shape],
        storage: &Storage,
    ) -> Result<Space, AllocationError> {
        let mut widths = Widths::of(spec);
        let share = storage.share_images && !storage.spills(spec);
        if storage.spills(spec) {
            widths = Widths { image: 0, contribution: 0, sum: 0 };
        }
        let images = Slab::bytes_for(image_sizes(widths.image, shapes));
        let shared = share.then(|| Slab::allocate_shared(images)).and_then(|shared| {
            shared.inspect_err(|error| tracing::info!(%error, "images cannot be mapped by workers")).ok()
        });
        let slab = Slab::allocate(Slab::bytes_for(sizes(spec, shapes, widths, shared.is_some())))?;
        Ok(Space { slab, shared, widths })
    }

    /// Takes memory that a tier keeps, [`Space::bytes`] long. Its images are not shared, since a process that
    /// may read the file could also write it.
    pub(super) fn of_tier(slab: Slab, spec: &JobSpec) -> Space {
        Space { slab, shared: None, widths: Widths::of(spec) }
    }

    /// Returns the bytes that all buffers need in one piece.
    pub(super) fn bytes(spec: &JobSpec, shapes: &[Shape]) -> usize {
        Slab::bytes_for(sizes(spec, shapes, Widths::of(spec), false))
    }
}

/// The sizes of the two images of each shard, and last the size of all version stamps. An element has `bytes` bytes.
fn image_sizes(bytes: usize, shapes: &[Shape]) -> Vec<usize> {
    let mut sizes: Vec<usize> = shapes.iter().flat_map(|shape| [shape.elements * bytes; 2]).collect();
    sizes.push(shapes.len() * 2 * size_of::<u64>());
    sizes
}

/// The sizes of each shard's images, contributions and sums, and last the size of all version stamps. With `apart`
/// images and stamps lie elsewhere and are left out.
fn sizes(spec: &JobSpec, shapes: &[Shape], widths: Widths, apart: bool) -> Vec<usize> {
    let images = image_sizes(widths.image, shapes);
    let (pairs, stamps) = images.as_chunks::<2>();
    let mut sizes = Vec::new();
    for (&Shape { elements, contributors, accumulates }, pair) in shapes.iter().zip(pairs) {
        if !apart {
            sizes.extend(pair);
        }
        for _ in 0..spec.gradient_slots() {
            sizes.extend(vec![elements * widths.contribution; contributors]);
            sizes.push(if accumulates { elements * widths.sum } else { 0 });
        }
    }
    if !apart {
        sizes.extend(stamps);
    }
    sizes
}

impl Buffers {
    /// `pool` is the threads that will work on the buffers.
    pub(super) fn over(
        space: Space,
        spec: &JobSpec,
        shapes: &[Shape],
        pool: &ThreadPool,
    ) -> Result<Buffers, AllocationError> {
        let slots = spec.gradient_slots();
        let mut apart = Vec::new().into_iter();
        let sizes = sizes(spec, shapes, space.widths, space.shared.is_some());
        let mut shared = None;
        if let Some((slab, file)) = space.shared {
            apart = slab.carve(&image_sizes(space.widths.image, shapes), pool)?.into_iter();
            shared = Some(file);
        }
        let mut regions = space.slab.carve(&sizes, pool)?.into_iter();
        let stamps = if shared.is_some() { apart.next_back() } else { regions.next_back() };
        let stamps = Arc::new(AtomicWords::new(stamps.expect("one region was carved for the stamps")));
        let mut next = || regions.next().expect("one region was carved for each size");
        let mut buffers = Buffers { images: Vec::new(), gradients: Vec::new(), shared };
        for (owned, shape) in OwnedShards::all(shapes.len()).zip(shapes) {
            buffers.images.push([0, 1].map(|parity| {
                let region = apart.next().unwrap_or_else(&mut next);
                let (stamps, stamp) = (Arc::clone(&stamps), 2 * owned.index() + parity);
                RwLock::new(Image::new(owned, region, stamps, stamp))
            }));
            let (mut contributions, mut accumulators) = (Vec::new(), Vec::new());
            for _ in 0..slots {
                let one = |_| Mutex::new(Contribution::new(next()));
                contributions.push((0..shape.contributors).map(one).collect());
                let region = next();
                accumulators.push(shape.accumulates.then(|| Mutex::new(region)));
            }
            let statistics = (0..slots).map(|_| Mutex::new(Vec::new())).collect();
            let left_out = (0..slots).map(|_| Mutex::new(Vec::new())).collect();
            buffers.gradients.push(ShardGradients { contributions, accumulators, statistics, left_out });
        }
        Ok(buffers)
    }
}
