//! A job's images: the place of each, in DRAM or with the tier, and the place for the next one. The compute thread
//! makes images; pulls read them on their own threads.

mod image;

use std::{
    ops::{Range, RangeInclusive},
    sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, atomic::AtomicU64},
};

use longshore_proto::{Fault, Step, Version};

pub(super) use self::image::{Image, Window, image_blocks, window_need};
use super::share::Share;
use crate::{
    ids::OwnedShard,
    memory::{AllocationError, SharedFile},
    record::KeptShard,
    tier::{ImageAge, ImageStore, KeptMemory, Store, Tier},
};

/// The images of the owned shards. Each has a lock of its own.
pub struct Images {
    share: Arc<Share>,
    /// Images by owned shard, then by version parity. Empty where images live on drives, and for frozen shards, whose
    /// weights the tier keeps.
    shards: Vec<[RwLock<Image>; 2]>,
    /// Present in a job whose images live on drives.
    window: Option<Window>,
    /// The file that holds all images, if other processes may be given it.
    shared: Option<SharedFile>,
    /// Present where the tier stores images.
    stored: Option<Arc<dyn ImageStore>>,
    /// The state, of which a frozen shard's weights are a part.
    state: Arc<dyn Tier>,
    /// Bytes of payload that were pulled since the job was opened here.
    pub(super) pulled_bytes: AtomicU64,
}

impl Images {
    pub(super) fn new(
        share: &Arc<Share>,
        shards: Vec<[RwLock<Image>; 2]>,
        window: Option<Window>,
        shared: Option<SharedFile>,
        store: &Store,
    ) -> Images {
        let (stored, state) = (store.images.clone(), Arc::clone(&store.state));
        let (share, pulled_bytes) = (Arc::clone(share), AtomicU64::new(0));
        Images { share, shards, window, shared, stored, state, pulled_bytes }
    }

    /// Returns true if images live on drives, so that reading one may take a drive's time.
    pub(super) fn are_spilled(&self) -> bool {
        self.window.is_some()
    }

    /// The file with all images, if other processes may be given it.
    pub fn shared(&self) -> Option<&SharedFile> {
        self.shared.as_ref()
    }

    /// Returns the bytes of a trained shard's image.
    pub(super) fn len(&self, owned: OwnedShard) -> usize {
        self.share.elements(owned) * self.share.spec.image_dtype.bytes() as usize
    }

    /// Returns the place for a shard's image of a version, which may be longer than the image.
    pub(super) fn to_make(&self, owned: OwnedShard, version: Version) -> RwLockWriteGuard<'_, Image> {
        match &self.window {
            Some(window) => window.take(owned),
            None => self.place(owned, version).write().unwrap_or_else(PoisonError::into_inner),
        }
    }

    /// A shard's image of a version, if DRAM has it.
    pub(super) fn here(&self, owned: OwnedShard, version: Version) -> Option<RwLockReadGuard<'_, Image>> {
        match &self.window {
            Some(window) => window.find(owned, version),
            None => {
                let image = self.place(owned, version).read().unwrap_or_else(PoisonError::into_inner);
                Some(image).filter(|image| image.version() == Some(version))
            }
        }
    }

    fn place(&self, owned: OwnedShard, version: Version) -> &RwLock<Image> {
        &self.shards[owned.index()][version.0 as usize % 2]
    }

    /// Hands bytes of an image to `read`, from DRAM or from the tier, in one call or several. Returns false
    /// if the image is not kept any more.
    pub(super) fn read(
        &self,
        owned: OwnedShard,
        version: Version,
        bytes: Range<usize>,
        read: &mut dyn FnMut(&[u8]),
    ) -> Result<bool, Fault> {
        if self.share.is_frozen(owned) {
            return self.state.read_frozen(owned, bytes, read).map(|()| true);
        }
        if let Some(image) = self.here(owned, version) {
            read(&image.bytes()[bytes]);
            return Ok(true);
        }
        self.stored.as_ref().map_or(Ok(false), |images| images.read(owned, version, bytes, read))
    }

    /// Prefetches bytes of an image before a pull asks for them, unless DRAM has them.
    pub(super) fn read_ahead(&self, owned: OwnedShard, version: Version, bytes: Range<usize>) {
        if self.share.is_frozen(owned) {
            self.state.read_frozen_ahead(owned, bytes);
        } else if let Some(images) = &self.stored
            && self.are_spilled()
            && self.here(owned, version).is_none()
        {
            images.read_ahead(owned, version, bytes);
        }
    }

    /// Hands a shard's whole image of a version to `with`, or None if it is not kept.
    pub(super) fn with_whole<R>(
        &self,
        owned: OwnedShard,
        version: Version,
        with: impl FnOnce(Option<&[u8]>) -> R,
    ) -> Result<R, Fault> {
        if !self.are_spilled() {
            return Ok(with(self.here(owned, version).as_deref().map(Image::bytes)));
        }
        // The image is copied to memory of its own, since updates need the places in the window.
        let mut aside = Vec::new();
        let mut copy = |bytes: &[u8]| aside.extend_from_slice(bytes);
        let found = self.read(owned, version, 0..self.len(owned), &mut copy)?;
        Ok(with(found.then_some(&aside)))
    }

    /// Gives a skipped step's version the image of the version before, since the step changes nothing.
    pub(super) fn carry(&self, owned: OwnedShard, step: Step) {
        if self.are_spilled() {
            // The tier knows that both versions have the image on its drives.
            return;
        }
        let images = &self.shards[owned.index()];
        let before = images[(step.0 as usize + 1) % 2].read().unwrap_or_else(PoisonError::into_inner);
        let mut after = images[step.0 as usize % 2].write().unwrap_or_else(PoisonError::into_inner);
        after.overwrite().bytes_mut().copy_from_slice(before.bytes());
        after.set(Some(step.version()));
    }

    /// Stores a loaded shard's images in the tier, if the tier stores images.
    pub(super) fn store(&self, owned: OwnedShard, version: Version) -> Result<(), Fault> {
        let Some(stored) = &self.stored else { return Ok(()) };
        for (age, behind) in [(ImageAge::Current, 0), (ImageAge::Older, 1)] {
            let image = version.0.checked_sub(behind).and_then(|kept| self.here(owned, Version(kept)));
            if let Some(image) = image {
                stored.store(owned, age, 0, &image.bytes()[..self.len(owned)])?;
            }
        }
        Ok(())
    }

    /// Reads both images of a recovered shard from the tier, as far as it has them. `kept` are the versions of the
    /// shard that this server has had.
    pub(super) fn recover(
        &self,
        owned: OwnedShard,
        version: Version,
        kept: &RangeInclusive<Version>,
    ) -> Result<(), Fault> {
        let Some(stored) = &self.stored else { return Ok(()) };
        for (age, behind) in [(ImageAge::Current, 0), (ImageAge::Older, 1)] {
            let of = version.0.checked_sub(behind).map(Version).filter(|of| kept.contains(of));
            let Some(of) = of else { continue };
            let mut image = self.to_make(owned, of);
            let place = &mut image.overwrite().bytes_mut()[..self.len(owned)];
            let is_stored = stored.load(owned, age, place)?;
            image.set(is_stored.then_some(of));
        }
        Ok(())
    }

    /// Takes bytes of an image that another server sends with a shard's `version`, the tier's current one. Whole blocks
    /// only.
    pub(super) fn receive(
        &self,
        (owned, version, age): (OwnedShard, Version, ImageAge),
        start: usize,
        bytes: &[u8],
    ) -> Result<(), Fault> {
        match &self.stored {
            Some(stored) if self.are_spilled() => stored.store(owned, age, start, bytes),
            _ => {
                let behind = u64::from(age == ImageAge::Older);
                let mut image = self.to_make(owned, Version(version.0.saturating_sub(behind)));
                image.overwrite().bytes_mut()[start..start + bytes.len()].copy_from_slice(bytes);
                Ok(())
            }
        }
    }

    /// Keeps an image that is whole in DRAM. Its version is the tier's current one or the one before, as `age` says.
    pub(super) fn keep(
        &self,
        version: Version,
        age: ImageAge,
        mut image: RwLockWriteGuard<'_, Image>,
    ) -> Result<(), Fault> {
        if let Some(stored) = &self.stored {
            let (owned, bytes) = (image.owned(), &image.bytes()[..self.len(image.owned())]);
            stored.store(owned, age, 0, bytes)?;
            // A recovery compares both images with their checksums. So both are stored, though ranks of an exact job
            // read only the newest.
            if self.share.spec.max_delay == 0 && version.0 > 0 {
                stored.store(owned, ImageAge::Older, 0, bytes)?;
            }
        }
        image.set(Some(version));
        Ok(())
    }

    /// Marks the images that the tier recovered as valid: the image of the shard's version, and the older one if it is
    /// whole.
    pub(super) fn found(
        &self,
        owned: OwnedShard,
        shard: &KeptShard,
        kept: Option<&Arc<dyn KeptMemory>>,
    ) -> Result<(), Fault> {
        let older = shard.older_image.then(|| Version(shard.version.0 - 1));
        for version in [shard.version].into_iter().chain(older) {
            let mut image = self.place(owned, version).write().unwrap_or_else(PoisonError::into_inner);
            kept.map_or(Ok(()), |kept| kept.check_image(owned, version, &image.bytes()[..self.len(owned)]))?;
            image.set(Some(version));
        }
        Ok(())
    }

    /// Reserves the space of a shard's images in a file that outlives the process.
    pub(super) fn make_room(&self, owned: OwnedShard) -> Result<(), AllocationError> {
        let mut images = self.shards.get(owned.index()).into_iter().flatten();
        images.try_for_each(|image| image.read().unwrap_or_else(PoisonError::into_inner).reserve())
    }

    /// Frees the memory of a shard's images, which another server makes from now on.
    pub(super) fn release(&self, owned: OwnedShard) {
        for image in self.shards.get(owned.index()).into_iter().flatten() {
            image.write().unwrap_or_else(PoisonError::into_inner).release();
        }
    }

    /// Forgets the versions of all images.
    pub(super) fn forget(&self) {
        let window = self.window.iter().flat_map(|window| &window.images);
        for image in window.chain(self.shards.iter().flatten()) {
            image.write().unwrap_or_else(PoisonError::into_inner).set(None);
        }
        if let Some(stored) = &self.stored {
            stored.forget();
        }
    }
}
