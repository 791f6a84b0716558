//! Pulls: bytes of the image of one version.

use std::sync::atomic::Ordering;

use longshore_proto::{Dtype, Fault, Slice, Version};

use super::{Job, buffers::Image};
use crate::{lock, memory::Glimpse, step::Refusal};

/// What a pull found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageRead {
    Done,
    /// The shard does not have that version yet. Ask again after a change.
    NotYet,
}

/// Where a slice of an image lies in the shared file, and the word that says 1 + the image's version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImagePlace {
    /// Bytes from the file's start.
    pub at: u64,
    pub word: u64,
}

impl Job {
    /// Checks a slice before any of it is read: inside an owned shard, in the job's image dtype.
    pub fn check_slice(&self, slice: &Slice, dtype: Dtype) -> Result<(), Fault> {
        self.owned_index(slice.shard)?;
        let elements = self.layout.shard_len(slice.shard);
        if slice.elements == 0 || slice.offset.checked_add(slice.elements).is_none_or(|end| end > elements) {
            let value = format!("{} elements at {} of {}", slice.elements, slice.offset, slice.shard);
            let limit = format!("at least 1 and inside the shard's {elements}");
            return Err(Fault::invalid("slice", value, limit, "cut the slice at the shard's end"));
        }
        if dtype != self.spec.image_dtype {
            return Err(Refusal::WrongDtype { dtype, expected: self.spec.image_dtype }.into());
        }
        Ok(())
    }

    /// Hands the bytes of a checked slice of one version's image to `read`.
    pub fn read_image(
        &self,
        slice: &Slice,
        version: Version,
        read: &mut dyn FnMut(&[u8]),
    ) -> Result<ImageRead, Fault> {
        let (start, bytes) = self.image_bytes(slice);
        self.with_image(slice, version, bytes, |image| read(&image.bytes()[start..][..bytes]))
    }

    /// The bytes of a checked slice of one version's image, to be sent, and their checksum. None: it is not there yet.
    ///
    /// The version after next may overwrite them while they are sent: then the checksum is wrong for what arrives, and
    /// whoever asks again is told that the version is gone.
    pub fn lend_image(&self, slice: &Slice, version: Version) -> Result<Option<(Glimpse, u32)>, Fault> {
        let (start, bytes) = self.image_bytes(slice);
        let within = start..start + bytes;
        let mut lent = None;
        self.with_image(slice, version, bytes, |image| {
            let sum = image.checksum(within.clone());
            lent = Some((image.glimpse(within), sum));
        })?;
        Ok(lent)
    }

    /// Says where a checked slice of one version's image lies in the file of [`Job::shared_images`].
    pub fn place_image(&self, slice: &Slice, version: Version) -> Result<Option<ImagePlace>, Fault> {
        let (start, bytes) = self.image_bytes(slice);
        let mut place = None;
        self.with_image(slice, version, bytes, |image| {
            let (image, word) = image.place();
            place = Some(ImagePlace { at: image + start as u64, word });
        })?;
        Ok(place)
    }

    /// Start and length of a slice in its shard's image.
    fn image_bytes(&self, slice: &Slice) -> (usize, usize) {
        let size = self.spec.image_dtype.bytes();
        ((slice.offset * size) as usize, (slice.elements * size) as usize)
    }

    fn with_image(
        &self,
        slice: &Slice,
        version: Version,
        bytes: usize,
        with: impl FnOnce(&Image),
    ) -> Result<ImageRead, Fault> {
        self.check_alive()?;
        let machine = lock(&self.machine);
        let owned = machine.owned_index(slice.shard)?;
        if !machine.check_pull(owned, version)? {
            return Ok(ImageRead::NotYet);
        }
        drop(machine);
        let images = &self.buffers.shards[owned].images;
        let image = images[version.0 as usize % 2].read().unwrap_or_else(|poison| poison.into_inner());
        if image.version() != Some(version) {
            drop(image);
            let version_of =
                |parity: usize| images[parity].read().unwrap_or_else(|poison| poison.into_inner()).version();
            let mut kept: Vec<Version> = [0, 1].into_iter().filter_map(version_of).collect();
            kept.sort();
            return Err(Refusal::VersionGone { version, kept }.into());
        }
        with(&image);
        self.pulled_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        Ok(ImageRead::Done)
    }
}
