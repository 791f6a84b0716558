//! Where a shard's images are: all in DRAM, or on drives with an image window in DRAM. Workers pull shard after shard
//! behind the update, so most of what they ask for is still in the window.

use std::{
    ops::Range,
    sync::{
        Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
        atomic::{AtomicUsize, Ordering},
    },
};

use longshore_proto::{Fault, JobSpec, Layout, ShardId, Version};

use super::{Job, buffers::Image};
use crate::{
    memory::{AllocationError, Slab, Words},
    threads::Pool,
    tier::Storage,
};

/// The image window: the images in DRAM of a job whose images live on drives.
pub(super) struct Window {
    images: Vec<RwLock<Image>>,
    /// The index of the image that gives way next.
    next: AtomicUsize,
}

/// How many images are in DRAM, and the bytes of the largest.
struct Size {
    count: usize,
    bytes: usize,
}

impl Size {
    fn of(spec: &JobSpec, layout: &Layout, owned: &[ShardId], storage: &Storage) -> Size {
        let largest = owned.iter().map(|&shard| layout.shard_len(shard)).max().unwrap_or(0);
        // These are as many as may be on their way to the drives, and never fewer than the two of a shard.
        let count = storage.buffers.max(2).min(2 * owned.len());
        Size { count, bytes: (largest * spec.image_dtype.bytes()) as usize }
    }
}

/// How much DRAM the images of a job take whose images live on drives. A delayed job's checkpoint takes two more at
/// once.
pub(crate) fn need(spec: &JobSpec, layout: &Layout, owned: &[ShardId], storage: &Storage) -> u64 {
    let Size { count, bytes } = Size::of(spec, layout, owned, storage);
    let aside = if spec.max_delay > 0 { 2 } else { 0 };
    (count * size_of::<u64>() + (count + aside) * bytes) as u64
}

impl Window {
    /// `pool` is the threads that will write the images.
    pub(super) fn allocate(
        spec: &JobSpec,
        layout: &Layout,
        owned: &[ShardId],
        storage: &Storage,
        pool: &Pool,
    ) -> Result<Window, AllocationError> {
        let Size { count, bytes } = Size::of(spec, layout, owned, storage);
        let mut sizes = vec![bytes; count];
        sizes.push(count * size_of::<u64>());
        let mut regions = Slab::allocate(Slab::bytes_for(sizes.iter().copied()))?.carve(&sizes, pool)?;
        let words = Arc::new(Words::new(regions.pop().expect("one region was carved for the words")));
        let image = |(word, region)| RwLock::new(Image::new(0, region, Arc::clone(&words), word));
        Ok(Window { images: regions.into_iter().enumerate().map(image).collect(), next: AtomicUsize::new(0) })
    }

    /// Finds an image. One that is being written is passed over: it is of another version, since a new version is
    /// asked for only once it is whole.
    fn find(&self, owned: usize, version: Version) -> Option<RwLockReadGuard<'_, Image>> {
        let mut images = self.images.iter().filter_map(|image| image.try_read().ok());
        images.find(|image| image.owned == owned && image.version() == Some(version))
    }

    /// Takes the image that was made longest ago, which gives way.
    fn take(&self, owned: usize) -> RwLockWriteGuard<'_, Image> {
        let next = self.next.fetch_add(1, Ordering::Relaxed) % self.images.len();
        let mut image = self.images[next].write().unwrap_or_else(PoisonError::into_inner);
        image.set(None);
        image.owned = owned;
        image
    }
}

impl Job {
    /// Whether images live on drives, so that reading one may take a drive's time.
    pub fn spills_images(&self) -> bool {
        self.window.is_some()
    }

    /// How many bytes a shard's image has.
    pub(super) fn image_len(&self, owned: usize) -> usize {
        (self.layout.shard_len(self.owned[owned]) * self.spec.image_dtype.bytes()) as usize
    }

    /// Where a shard's image of a version is to be made. It may be longer than the shard's image.
    pub(super) fn image_to_make(&self, owned: usize, version: Version) -> RwLockWriteGuard<'_, Image> {
        match &self.window {
            Some(window) => window.take(owned),
            None => {
                let image = &self.buffers.shards[owned].images[version.0 as usize % 2];
                image.write().unwrap_or_else(PoisonError::into_inner)
            }
        }
    }

    /// A shard's image of a version, if DRAM has it.
    pub(super) fn image_here(&self, owned: usize, version: Version) -> Option<RwLockReadGuard<'_, Image>> {
        match &self.window {
            Some(window) => window.find(owned, version),
            None => {
                let image = &self.buffers.shards[owned].images[version.0 as usize % 2];
                let image = image.read().unwrap_or_else(PoisonError::into_inner);
                Some(image).filter(|image| image.version() == Some(version))
            }
        }
    }

    /// Hands a shard's whole image of a version to `with`; None where there is none.
    pub(super) fn with_whole_image<R>(
        &self,
        owned: usize,
        version: Version,
        with: impl FnOnce(Option<&[u8]>) -> R,
    ) -> Result<R, Fault> {
        let length = self.image_len(owned);
        let here = self.image_here(owned, version);
        if !self.spills_images() {
            return Ok(with(here.as_deref().map(Image::bytes)));
        }
        // It is read into memory of its own, since updates want the window.
        let mut aside = Vec::new();
        let mut copy = |bytes: &[u8]| aside.extend_from_slice(bytes);
        let found = match here {
            Some(image) => {
                copy(&image.bytes()[..length]);
                true
            }
            None => self.stored_image(owned, version, 0..length, &mut copy)?,
        };
        Ok(with(found.then_some(&aside)))
    }

    /// Forgets which versions the images are of.
    pub(super) fn forget_images(&self) {
        let shards = self.buffers.shards.iter().flat_map(|shard| &shard.images);
        for image in self.window.iter().flat_map(|window| &window.images).chain(shards) {
            image.write().unwrap_or_else(PoisonError::into_inner).set(None);
        }
        if let Some(images) = &self.tier.images {
            images.forget();
        }
    }

    /// Hands bytes of an image that only the tier may have to `read`; false where it does not.
    pub(super) fn stored_image(
        &self,
        owned: usize,
        version: Version,
        bytes: Range<usize>,
        read: &mut dyn FnMut(&[u8]),
    ) -> Result<bool, Fault> {
        self.tier.images.as_ref().map_or(Ok(false), |images| images.read(owned, version, bytes, read))
    }
}
