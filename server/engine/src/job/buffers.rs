//! A job's DRAM beside its state: contributions, sums, gradient statistics and images.

use std::{
    ops::Range,
    sync::{
        Arc, Mutex, RwLock,
        atomic::{AtomicU64, Ordering},
    },
};

use longshore_proto::{Dtype, JobSpec, Version, checksum::crc32, limits::CHUNK_BYTES};

use super::contribution::Contribution;
use crate::{
    kernels::{Figures, ImageMut},
    memory::{AllocationError, Region, SharedBytes, SharedFile, Slab, Words},
    threads::Pool,
    tier::Storage,
};

/// By owned shard.
pub(super) struct Buffers {
    pub(super) shards: Vec<ShardBuffers>,
    /// The file that holds all images, if other processes may be given it.
    pub(super) shared: Option<SharedFile>,
}

pub(super) struct ShardBuffers {
    /// By gradient slot, then by rank: contributions in wire format.
    pub(super) contributions: Vec<Vec<Mutex<Contribution>>>,
    /// By gradient slot: the sum, in fp32. None where a step has one contribution, which is left as it came.
    pub(super) accumulators: Vec<Option<Mutex<Region>>>,
    /// By gradient slot: the gradient statistics of each block, once the step is complete.
    pub(super) figures: Vec<Mutex<Vec<Figures>>>,
    /// By version parity.
    pub(super) images: [RwLock<Image>; 2],
}

/// The 16-bit (or fp32) weights of a shard, and the version that they are of. The version is None while nothing valid
/// is there.
///
/// Readers in other processes cannot be locked out. So beside each image lies its version stamp: 1 + its version, or
/// 0 while it is being written. What was read between two looks at the right stamp was that version.
pub(super) struct Image {
    /// The index of its shard among the owned ones.
    pub(super) owned: usize,
    version: Option<Version>,
    region: Region,
    words: Arc<Words>,
    word: usize,
    /// The checksum of each chunk, once a pull has asked for it, since all ranks pull the same chunks. It is 0 until
    /// then.
    sums: Vec<AtomicU64>,
}

/// Set beside a checksum that is known.
const KNOWN: u64 = 1 << 32;

impl Image {
    pub(super) fn new(owned: usize, region: Region, words: Arc<Words>, word: usize) -> Image {
        let chunks = region.bytes().len().div_ceil(CHUNK_BYTES);
        let sums = (0..chunks).map(|_| AtomicU64::new(0)).collect();
        Image { owned, version: None, region, words, word, sums }
    }

    /// The checksum of some bytes. To read them takes most of the time that sending them does, so a whole chunk's
    /// checksum is kept.
    pub(super) fn checksum(&self, within: Range<usize>) -> u32 {
        let sum = || crc32(&self.bytes()[within.clone()]);
        let chunk = within.start / CHUNK_BYTES;
        let end = self.bytes().len().min((chunk + 1) * CHUNK_BYTES);
        if within.start != chunk * CHUNK_BYTES || within.end != end {
            return sum();
        }
        let known = self.sums[chunk].load(Ordering::Relaxed);
        if known != 0 {
            return known as u32;
        }
        let sum = sum();
        self.sums[chunk].store(KNOWN | u64::from(sum), Ordering::Relaxed);
        sum
    }

    pub(super) fn version(&self) -> Option<Version> {
        self.version
    }

    pub(super) fn bytes(&self) -> &[u8] {
        self.region.bytes()
    }

    /// Bytes to be sent, which the version after next may overwrite meanwhile.
    pub(super) fn share(&self, within: Range<usize>) -> SharedBytes {
        self.region.share(within)
    }

    /// Where the next version is written. From here on readers find the version before gone, and not half
    /// overwritten.
    pub(super) fn overwrite(&mut self) -> &mut Region {
        self.set(None);
        &mut self.region
    }

    /// Says which version the image is now.
    pub(super) fn set(&mut self, version: Option<Version>) {
        self.version = version;
        self.sums.iter_mut().for_each(|sum| *sum.get_mut() = 0);
        self.words.publish(self.word, version.map_or(0, |version| version.0 + 1));
    }

    /// Where the image and its version stamp lie in the shared file.
    pub(super) fn place(&self) -> (u64, u64) {
        (self.region.offset() as u64, (self.words.offset() + self.word * 8) as u64)
    }
}

/// The memory of a job's buffers, before it is cut.
pub(super) struct Space {
    slab: Slab,
    /// Images and version stamps, where they lie apart from the rest.
    shared: Option<(Slab, SharedFile)>,
    /// How many bytes of an element of each kind are here.
    widths: Widths,
}

/// Bytes of an element of each kind; 0 for those that live on drives.
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
            sum: if spec.accumulates() { 4 } else { 0 },
        }
    }
}

impl Space {
    /// Images lie in memory that other processes can be given, if that is wanted and the kernel has such memory.
    pub(super) fn allocate(
        spec: &JobSpec,
        lengths: &[usize],
        storage: &Storage,
    ) -> Result<Space, AllocationError> {
        let mut widths = Widths::of(spec);
        let share = storage.share_images && !storage.spills_images(spec);
        if storage.spills_images(spec) {
            widths.image = 0;
        }
        if storage.spills_gradients(spec) {
            (widths.contribution, widths.sum) = (0, 0);
        }
        let images = Slab::bytes_for(image_sizes(widths.image, lengths));
        let shared = share.then(|| Slab::allocate_shared(images)).and_then(|shared| {
            shared.inspect_err(|error| tracing::info!(%error, "images cannot be mapped by workers")).ok()
        });
        let slab = Slab::allocate(Slab::bytes_for(sizes(spec, lengths, widths, shared.is_some())))?;
        Ok(Space { slab, shared, widths })
    }

    /// Makes [`Space::bytes`] of memory that a tier keeps. Its images are not shared, since a process that may read
    /// the file could write it too.
    pub(super) fn of_tier(slab: Slab, spec: &JobSpec) -> Space {
        Space { slab, shared: None, widths: Widths::of(spec) }
    }

    /// How many bytes all buffers need in one piece.
    pub(super) fn bytes(spec: &JobSpec, lengths: &[usize]) -> usize {
        Slab::bytes_for(sizes(spec, lengths, Widths::of(spec), false))
    }
}

/// The sizes of both images of each shard, of so many bytes an element, then of their version stamps.
fn image_sizes(bytes: usize, lengths: &[usize]) -> Vec<usize> {
    let mut sizes: Vec<usize> = lengths.iter().flat_map(|&length| [length * bytes; 2]).collect();
    sizes.push(lengths.len() * 2 * size_of::<u64>());
    sizes
}

/// The sizes of each shard's images, contributions and sums, then of the version stamps. With `apart` there are no
/// images and no stamps.
fn sizes(spec: &JobSpec, lengths: &[usize], widths: Widths, apart: bool) -> Vec<usize> {
    let images = image_sizes(widths.image, lengths);
    let (pairs, words) = images.as_chunks::<2>();
    let mut sizes = Vec::new();
    for (&length, pair) in lengths.iter().zip(pairs) {
        if !apart {
            sizes.extend(pair);
        }
        for _ in 0..spec.gradient_slots() {
            sizes.extend(vec![length * widths.contribution; spec.world_size as usize]);
            sizes.push(length * widths.sum);
        }
    }
    if !apart {
        sizes.extend(words);
    }
    sizes
}

impl Buffers {
    /// `pool` is the threads that will work on the buffers.
    pub(super) fn over(
        space: Space,
        spec: &JobSpec,
        lengths: &[usize],
        pool: &Pool,
    ) -> Result<Buffers, AllocationError> {
        let (slots, ranks) = (spec.gradient_slots(), spec.world_size as usize);
        let mut apart = Vec::new().into_iter();
        let sizes = sizes(spec, lengths, space.widths, space.shared.is_some());
        let mut shared = None;
        if let Some((slab, file)) = space.shared {
            apart = slab.carve(&image_sizes(space.widths.image, lengths), pool)?.into_iter();
            shared = Some(file);
        }
        let mut regions = space.slab.carve(&sizes, pool)?.into_iter();
        let words = if shared.is_some() { apart.next_back() } else { regions.next_back() };
        let words = Arc::new(Words::new(words.expect("one region was carved for the words")));
        let mut next = || regions.next().expect("one region was carved for each size");
        let shards = (0..lengths.len()).map(|owned| {
            let images = [0, 1].map(|parity| {
                let region = apart.next().unwrap_or_else(&mut next);
                let (words, word) = (Arc::clone(&words), 2 * owned + parity);
                RwLock::new(Image::new(owned, region, words, word))
            });
            let (mut contributions, mut accumulators) = (Vec::new(), Vec::new());
            for _ in 0..slots {
                contributions.push((0..ranks).map(|_| Mutex::new(Contribution::new(next()))).collect());
                let region = next();
                accumulators.push(spec.accumulates().then(|| Mutex::new(region)));
            }
            let figures = (0..slots).map(|_| Mutex::new(Vec::new())).collect();
            ShardBuffers { contributions, accumulators, figures, images }
        });
        Ok(Buffers { shards: shards.collect(), shared })
    }
}

/// An image's region, cut into blocks.
pub(super) fn image_blocks(region: &mut Region, dtype: Dtype, block: usize) -> Vec<ImageMut<'_>> {
    match dtype {
        Dtype::F32 => region.f32_mut().chunks_mut(block).map(ImageMut::F32).collect(),
        Dtype::F16 => region.u16_mut().chunks_mut(block).map(ImageMut::F16).collect(),
        Dtype::Bf16 => region.u16_mut().chunks_mut(block).map(ImageMut::Bf16).collect(),
    }
}
