//! Pulls: bytes of the image of one version. gRPC calls run this on their own threads.

use std::{ops::Range, sync::atomic::Ordering};

use longshore_proto::{Dtype, Fault, ShardId, Slice, Version, checksum::crc32};

use super::{Job, compute::BLOCK, images::Image};
use crate::{ids::OwnedShard, memory::SharedBytes, step::Refusal};

/// Place of a slice of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ImagePlace {
    /// The slice and its version stamp lie in the shared file, at these byte offsets.
    At { at: u64, stamp: u64 },
    /// Not in the shared file.
    Elsewhere,
}

/// Bytes of an image, and their checksum.
pub struct Pulled<T> {
    pub bytes: T,
    pub crc32: u32,
}

/// Bytes of an image, to be sent.
pub enum ImageBytes {
    /// The bytes are in the job's memory. The version after next may overwrite them while they are sent. The reader
    /// then sees a wrong checksum, asks again, and hears that the version is gone.
    Here(SharedBytes),
    /// The bytes were copied from drives or from the tier's state.
    Read(Vec<u8>),
}

impl Job {
    /// Checks a slice before any of it is read: an owned shard must contain it, in the job's image dtype.
    pub fn check_slice(&self, slice: &Slice, dtype: Dtype) -> Result<(), Fault> {
        self.protocol.machine().owned_index(slice.shard)?;
        let elements = self.share.layout.shard_len(slice.shard);
        if slice.elements == 0 || slice.offset.checked_add(slice.elements).is_none_or(|end| end > elements) {
            let value = format!("{} elements at {} of {}", slice.elements, slice.offset, slice.shard);
            let limit = format!("at least 1 and inside the shard's {elements}");
            return Err(Fault::invalid("slice", value, limit, "cut the slice at the shard's end"));
        }
        if dtype != self.share.spec.image_dtype {
            return Err(Refusal::WrongDtype { dtype, expected: self.share.spec.image_dtype }.into());
        }
        Ok(())
    }

    /// Returns true if pulls of a shard copy the tier's data: spilled images, and frozen weights.
    pub fn reads_state(&self, shard: ShardId) -> bool {
        self.images.are_spilled() || self.share.layout.is_frozen(shard)
    }

    /// Prefetches a checked slice of one version's image before its pull. Returns at once. Does nothing before the
    /// shard has the version, or without room.
    pub fn read_ahead(&self, slice: &Slice, version: Version) {
        if self.reads_state(slice.shard)
            && let Ok(Some(owned)) = self.ready(slice, version)
        {
            self.images.read_ahead(owned, version, self.image_bytes(slice));
        }
    }

    /// Lends the bytes of a checked slice of one version's image, for the kernel to read. Returns None while
    /// the shard does not have the version yet.
    pub fn lend_image(&self, slice: &Slice, version: Version) -> Result<Option<Pulled<ImageBytes>>, Fault> {
        self.take_image(
            slice,
            version,
            |image, within| ImageBytes::Here(image.share(within)),
            ImageBytes::Read,
        )
    }

    /// Copies the bytes that [`Job::lend_image`] would lend. No update can write them during the copy.
    pub fn copy_image(&self, slice: &Slice, version: Version) -> Result<Option<Pulled<Vec<u8>>>, Fault> {
        self.take_image(slice, version, |image, within| image.bytes()[within].to_vec(), |read| read)
    }

    fn take_image<T>(
        &self,
        slice: &Slice,
        version: Version,
        here: impl FnOnce(&Image, Range<usize>) -> T,
        read: impl FnOnce(Vec<u8>) -> T,
    ) -> Result<Option<Pulled<T>>, Fault> {
        let within = self.image_bytes(slice);
        let Some(owned) = self.ready(slice, version)? else { return Ok(None) };
        let image = if self.share.is_frozen(owned) {
            let block = BLOCK * self.share.spec.image_dtype.bytes() as usize;
            self.check_blocks(owned, within.start / block..within.end.div_ceil(block))?;
            None
        } else {
            self.images.here(owned, version)
        };
        let (bytes, crc32) = if let Some(image) = image {
            (here(&image, within.clone()), image.checksum(within.clone()))
        } else {
            let mut found = Vec::with_capacity(within.len());
            let mut take = |part: &[u8]| found.extend_from_slice(part);
            if !self.images.read(owned, version, within.clone(), &mut take)? {
                return Err(self.gone(owned, version));
            }
            let sum = crc32(&found);
            (read(found), sum)
        };
        self.images.pulled_bytes.fetch_add(within.len() as u64, Ordering::Relaxed);
        Ok(Some(Pulled { bytes, crc32 }))
    }

    /// Returns the place of a checked slice of one version's image in the shared file.
    pub fn place_image(&self, slice: &Slice, version: Version) -> Result<Option<ImagePlace>, Fault> {
        let bytes = self.image_bytes(slice);
        let Some(owned) = self.ready(slice, version)? else { return Ok(None) };
        if self.share.is_frozen(owned) {
            return Ok(Some(ImagePlace::Elsewhere));
        }
        let Some(image) = self.images.here(owned, version) else { return Err(self.gone(owned, version)) };
        let (image, stamp) = image.place();
        self.images.pulled_bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        Ok(Some(ImagePlace::At { at: image + bytes.start as u64, stamp }))
    }

    /// Returns Some once the slice can be read, without reading it.
    pub fn has_image(&self, slice: &Slice, version: Version) -> Result<Option<()>, Fault> {
        Ok(self.ready(slice, version)?.map(|_| ()))
    }

    /// The bytes of a slice in its shard's image.
    fn image_bytes(&self, slice: &Slice) -> Range<usize> {
        let size = self.share.spec.image_dtype.bytes();
        (slice.offset * size) as usize..((slice.offset + slice.elements) * size) as usize
    }

    /// The shard's index among the owned ones, once the shard has the version.
    fn ready(&self, slice: &Slice, version: Version) -> Result<Option<OwnedShard>, Fault> {
        self.protocol.check_alive()?;
        let machine = self.protocol.machine();
        let owned = machine.owned_index(slice.shard)?;
        Ok(machine.check_pull(owned, version)?.then_some(owned))
    }

    fn gone(&self, owned: OwnedShard, version: Version) -> Fault {
        let at = self.protocol.machine().shard_version(owned);
        let newest = [at.0.saturating_sub(1), at.0].map(Version);
        let here =
            |&version: &Version| self.images.are_spilled() || self.images.here(owned, version).is_some();
        let mut kept: Vec<Version> = newest.into_iter().filter(here).collect();
        kept.dedup();
        Refusal::VersionGone { version, kept }.into()
    }
}
