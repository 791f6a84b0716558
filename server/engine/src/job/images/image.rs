//! Image of a shard: its 16-bit weights at one version, the version stamp beside them, and their checksums.

use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use longshore_proto::{Dtype, Version, checksum::crc32, limits::CHUNK_BYTES};

use crate::{
    ids::OwnedShard,
    kernels::ImageMut,
    memory::{AtomicWords, Region, SharedBytes},
};

/// The 16-bit (or fp32) weights of a shard, and their version. The version is None while nothing valid is
/// there.
///
/// Readers in other processes cannot be locked out. So a version stamp lies beside each image: 1 + its
/// version, or 0 while it is being written. Bytes read between two looks at the right stamp were of that
/// version.
pub(in crate::job) struct Image {
    /// The index of its shard among the owned ones.
    pub(super) owned: OwnedShard,
    version: Option<Version>,
    region: Region,
    stamps: Arc<AtomicWords>,
    stamp: usize,
    /// The checksum of each chunk, with [`KNOWN`] set, once a pull has asked for it, and 0 until then. All
    /// ranks pull the same chunks, so the checksums are shared.
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

    /// Returns the checksum of some bytes. Computing it takes most of the time that sending them takes. So
    /// the checksum of a whole chunk is kept.
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

    pub(in crate::job) fn version(&self) -> Option<Version> {
        self.version
    }

    pub(in crate::job) fn bytes(&self) -> &[u8] {
        self.region.bytes()
    }

    /// Returns bytes of the image to send. The version after next may overwrite them during the send.
    pub(super) fn share(&self, within: Range<usize>) -> SharedBytes {
        self.region.share(within)
    }

    /// Returns the memory to write another version to, and withdraws the old version first. No reader then
    /// takes a half-written image for the old version.
    pub(in crate::job) fn overwrite(&mut self) -> &mut Region {
        self.set(None);
        &mut self.region
    }

    /// Sets the version of the image.
    pub(in crate::job) fn set(&mut self, version: Option<Version>) {
        self.version = version;
        self.sums.iter_mut().for_each(|sum| *sum.get_mut() = 0);
        self.stamps.publish(self.stamp, version.map_or(0, |version| version.0 + 1));
    }

    /// Returns the offsets of the image and its version stamp in the shared file.
    pub(super) fn place(&self) -> (u64, u64) {
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
