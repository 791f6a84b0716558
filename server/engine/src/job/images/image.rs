//! Image of a shard: its 16-bit weights at one version, the version stamp beside them, and their checksums.
//!
//! Where images live on drives, the image window keeps the newest ones in DRAM. Workers pull shard after shard behind
//! the update, so the window still has most of the images that they ask for.

use std::{
    ops::Range,
    sync::{
        Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

use longshore_proto::{Dtype, JobSpec, Layout, ShardId, Version, checksum::crc32, limits::CHUNK_BYTES};

use super::super::share::Share;
use crate::{
    ids::OwnedShard,
    kernels::ImageMut,
    memory::{AllocationError, AtomicWords, Region, SharedBytes, Slab},
    threads::ThreadPool,
    tier::Storage,
};

/// The 16-bit (or fp32) weights of a shard, and their version. The version is None while the bytes are not valid.
///
/// A lock cannot keep readers in other processes out. A version stamp lies beside each image: 1 + its version, or 0
/// during a write. Bytes are valid if the stamp is right both before and after they were read.
pub(in crate::job) struct Image {
    /// The shard whose image this is.
    owned: OwnedShard,
    version: Option<Version>,
    region: Region,
    stamps: Arc<AtomicWords>,
    stamp: usize,
    /// The checksum of each chunk, with [`KNOWN`] set, once a pull has asked for it; 0 until then. All ranks pull the
    /// same chunks, so they share checksums.
    sums: Vec<AtomicU64>,
}

/// Bit that marks a checksum as computed, since the checksum itself may be 0.
const KNOWN: u64 = 1 << 32;

impl Image {
    pub(in crate::job) fn new(
        owned: OwnedShard,
        region: Region,
        stamps: Arc<AtomicWords>,
        stamp: usize,
    ) -> Image {
        let chunks = region.bytes().len().div_ceil(CHUNK_BYTES);
        let sums = (0..chunks).map(|_| AtomicU64::new(0)).collect();
        Image { owned, version: None, region, stamps, stamp, sums }
    }

    /// Returns the checksum of some bytes. A checksum takes almost as long as sending the bytes, so the checksum of a
    /// whole chunk is kept.
    pub(in crate::job) fn checksum(&self, within: Range<usize>) -> u32 {
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

    pub(in crate::job) fn owned(&self) -> OwnedShard {
        self.owned
    }

    pub(in crate::job) fn version(&self) -> Option<Version> {
        self.version
    }

    pub(in crate::job) fn bytes(&self) -> &[u8] {
        self.region.bytes()
    }

    /// Returns bytes of the image to send. The version after next may overwrite them during the send.
    pub(in crate::job) fn share(&self, within: Range<usize>) -> SharedBytes {
        self.region.share(within)
    }

    /// Withdraws the old version, and returns its memory for another one. No reader then takes a half-written image for
    /// the old version.
    pub(in crate::job) fn overwrite(&mut self) -> &mut Region {
        self.set(None);
        &mut self.region
    }

    pub(in crate::job) fn reserve(&self) -> Result<(), AllocationError> {
        self.region.reserve()
    }

    /// Withdraws the image, and frees its memory until the next one is made.
    pub(in crate::job) fn release(&mut self) {
        if let Err(error) = self.overwrite().give_back() {
            tracing::debug!(%error, "memory of an image stays");
        }
    }

    /// Sets the version of the image.
    pub(in crate::job) fn set(&mut self, version: Option<Version>) {
        self.version = version;
        self.sums.iter_mut().for_each(|sum| *sum.get_mut() = 0);
        self.stamps.publish(self.stamp, version.map_or(0, |version| version.0 + 1));
    }

    /// Returns the offsets of the image and its version stamp in the shared file.
    pub(in crate::job) fn place(&self) -> (u64, u64) {
        (self.region.offset() as u64, (self.stamps.offset() + self.stamp * 8) as u64)
    }
}

/// An image's region, cut into blocks.
pub(in crate::job) fn image_blocks(region: &mut Region, dtype: Dtype, block: usize) -> Vec<ImageMut<'_>> {
    match dtype {
        Dtype::F32 => region.f32_mut().chunks_mut(block).map(ImageMut::F32).collect(),
        Dtype::F16 => region.u16_mut().chunks_mut(block).map(ImageMut::F16).collect(),
        Dtype::Bf16 => region.u16_mut().chunks_mut(block).map(ImageMut::Bf16).collect(),
    }
}

/// The image window: the images in DRAM of a job whose images live on drives.
pub(in crate::job) struct Window {
    pub(super) images: Vec<RwLock<Image>>,
    /// The index of the image that is evicted next.
    next: AtomicUsize,
}

/// Number of images in DRAM, and the bytes of the largest.
struct Size {
    count: usize,
    bytes: usize,
}

impl Size {
    fn of(spec: &JobSpec, layout: &Layout, storage: &Storage) -> Size {
        // Any trained shard of the job may move to this server, so the largest decides.
        let trained = (0..layout.shards()).map(ShardId).filter(|&shard| !layout.is_frozen(shard));
        let trained: Vec<u64> = trained.map(|shard| layout.shard_len(shard)).collect();
        let largest = trained.iter().copied().max().unwrap_or(0);
        // The window has an image for each storage buffer, and never fewer than the two of a shard.
        let count = storage.buffers.max(2).min(2 * trained.len());
        Size { count, bytes: (largest * spec.image_dtype.bytes()) as usize }
    }
}

/// Returns the DRAM that images on drives take: the window, and in a delayed job two images for a checkpoint's copies.
pub(in crate::job) fn window_need(spec: &JobSpec, layout: &Layout, storage: &Storage) -> u64 {
    let Size { count, bytes } = Size::of(spec, layout, storage);
    let aside = if spec.max_delay > 0 { 2 } else { 0 };
    (count * size_of::<u64>() + (count + aside) * bytes) as u64
}

impl Window {
    /// `pool` is the threads that will write the images.
    pub(in crate::job) fn allocate(
        share: &Share,
        storage: &Storage,
        pool: &ThreadPool,
    ) -> Result<Window, AllocationError> {
        let Size { count, bytes } = Size::of(&share.spec, &share.layout, storage);
        let mut sizes = vec![bytes; count];
        sizes.push(count * size_of::<u64>());
        let mut regions = Slab::allocate(Slab::bytes_for(sizes.iter().copied()))?.carve(&sizes, pool)?;
        let stamps = Arc::new(AtomicWords::new(regions.pop().expect("one region was carved for the stamps")));
        let image =
            |(stamp, region)| RwLock::new(Image::new(OwnedShard(0), region, Arc::clone(&stamps), stamp));
        Ok(Window { images: regions.into_iter().enumerate().map(image).collect(), next: AtomicUsize::new(0) })
    }

    /// Returns an image if the window has it. An image that is being written is skipped, since no caller asks for a
    /// version before it is whole.
    pub(super) fn find(&self, owned: OwnedShard, version: Version) -> Option<RwLockReadGuard<'_, Image>> {
        let mut images = self.images.iter().filter_map(|image| image.try_read().ok());
        images.find(|image| image.owned == owned && image.version() == Some(version))
    }

    /// Evicts the oldest image, and returns its memory for shard `owned`.
    pub(super) fn take(&self, owned: OwnedShard) -> RwLockWriteGuard<'_, Image> {
        let next = self.next.fetch_add(1, Ordering::Relaxed) % self.images.len();
        let mut image = self.images[next].write().unwrap_or_else(PoisonError::into_inner);
        image.set(None);
        image.owned = owned;
        image
    }
}
