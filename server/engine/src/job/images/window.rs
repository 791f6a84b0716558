//! The image window keeps the newest images in DRAM where images live on drives. Workers pull shard after
//! shard behind the update, so the window still has most of the images they ask for.

use std::sync::{
    Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
    atomic::{AtomicUsize, Ordering},
};

use longshore_proto::{JobSpec, Layout, ShardId, Version};

use super::Image;
use crate::{
    ids::OwnedShard,
    memory::{AllocationError, AtomicWords, Slab},
    threads::ThreadPool,
    tier::Storage,
};

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
    fn of(spec: &JobSpec, layout: &Layout, owned: &[ShardId], storage: &Storage) -> Size {
        let trained: Vec<_> = owned.iter().filter(|&&shard| !layout.is_frozen(shard)).collect();
        let largest = trained.iter().map(|&&shard| layout.shard_len(shard)).max().unwrap_or(0);
        // The window has as many images as may be on their way to the drives, and never fewer than the two of
        // a shard.
        let count = storage.buffers.max(2).min(2 * trained.len());
        Size { count, bytes: (largest * spec.image_dtype.bytes()) as usize }
    }
}

/// Returns the DRAM that a job's images take if they live on drives. The window is part of it, and in a
/// delayed job the two images that a checkpoint copies at a time.
pub(crate) fn need(spec: &JobSpec, layout: &Layout, owned: &[ShardId], storage: &Storage) -> u64 {
    let Size { count, bytes } = Size::of(spec, layout, owned, storage);
    let aside = if spec.max_delay > 0 { 2 } else { 0 };
    (count * size_of::<u64>() + (count + aside) * bytes) as u64
}

impl Window {
    /// `pool` is the threads that will write the images.
    pub(in crate::job) fn allocate(
        spec: &JobSpec,
        layout: &Layout,
        owned: &[ShardId],
        storage: &Storage,
        pool: &ThreadPool,
    ) -> Result<Window, AllocationError> {
        let Size { count, bytes } = Size::of(spec, layout, owned, storage);
        let mut sizes = vec![bytes; count];
        sizes.push(count * size_of::<u64>());
        let mut regions = Slab::allocate(Slab::bytes_for(sizes.iter().copied()))?.carve(&sizes, pool)?;
        let stamps = Arc::new(AtomicWords::new(regions.pop().expect("one region was carved for the stamps")));
        let image =
            |(stamp, region)| RwLock::new(Image::new(OwnedShard(0), region, Arc::clone(&stamps), stamp));
        Ok(Window { images: regions.into_iter().enumerate().map(image).collect(), next: AtomicUsize::new(0) })
    }

    /// Returns an image if the window has it. An image that is being written is skipped: nobody asks for a
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
