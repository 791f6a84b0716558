//! An exclusive part of a slab.

#![allow(unsafe_code)]

use std::{
    ops::Range,
    sync::{Arc, atomic::AtomicU64},
};

use memmap2::MmapMut;

/// Owns its bytes as a `Box<[u8]>` would, but inside a shared mapping that lives until its last region is dropped.
pub struct Region {
    start: *mut u8,
    len: usize,
    map: Arc<MmapMut>,
}

// SAFETY: a region is the only one to reach its bytes (`Region::new` is called by `Slab::carve` alone, with disjoint
// ranges), so moving it to another thread moves exclusive access, as for a Box.
unsafe impl Send for Region {}
// SAFETY: through a shared reference bytes can only be read.
unsafe impl Sync for Region {}

/// The whole mapping that a region is part of, kept alive: what a ring registers with the kernel.
#[derive(Clone)]
pub struct Mapping {
    map: Arc<MmapMut>,
}

impl Mapping {
    /// Address of its first byte.
    pub fn start(&self) -> usize {
        self.map.as_ptr() as usize
    }

    pub fn len(&self) -> usize {
        self.map.len()
    }

    pub fn is_empty(&self) -> bool {
        self.map.is_empty()
    }
}

/// Bytes of a region as a socket may read them: they stay mapped, but their owner may overwrite them meanwhile.
///
/// Whoever gets what was sent must tell by its checksum whether that happened. So weights can be sent from where they
/// are, and no reader, however slow, keeps the next update from its buffer.
pub struct Glimpse {
    start: *const u8,
    len: usize,
    _map: Arc<MmapMut>,
}

// SAFETY: it holds the mapping, which may be used from any thread, and only ever gives out its bytes to be read.
unsafe impl Send for Glimpse {}
// SAFETY: as above.
unsafe impl Sync for Glimpse {}

impl AsRef<[u8]> for Glimpse {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the bytes were inside the region, and stay mapped and initialised. They may change while the slice
        // lives: every value is a valid byte, and its only use is to be handed to the kernel by address. What arrives
        // does not count before its checksum was compared with the one taken while nobody could write.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
}

impl Region {
    /// Bytes to be sent after the borrow has ended: see [`Glimpse`].
    pub fn glimpse(&self, within: Range<usize>) -> Glimpse {
        let bytes = &self.bytes()[within];
        Glimpse { start: bytes.as_ptr(), len: bytes.len(), _map: Arc::clone(&self.map) }
    }

    /// The caller gives each byte of the mapping to at most one region.
    pub(super) fn new(map: Arc<MmapMut>, start: usize, len: usize) -> Region {
        assert!(start + len <= map.len());
        // SAFETY: start is inside the mapping, as just asserted.
        let start = unsafe { map.as_ptr().cast_mut().add(start) };
        Region { start, len, map }
    }

    pub fn mapping(&self) -> Mapping {
        Mapping { map: Arc::clone(&self.map) }
    }

    /// Where it begins in its mapping.
    pub fn offset(&self) -> usize {
        self.start.addr() - self.map.as_ptr().addr()
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping is alive, initialised (anonymous pages are zero) and this range belongs to self alone.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`; &mut self makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }

    /// # Panics
    /// If the length is not whole elements.
    pub fn f32(&self) -> &[f32] {
        bytemuck::cast_slice(self.bytes())
    }

    pub fn f32_mut(&mut self) -> &mut [f32] {
        bytemuck::cast_slice_mut(self.bytes_mut())
    }

    pub fn u16(&self) -> &[u16] {
        bytemuck::cast_slice(self.bytes())
    }

    pub fn u16_mut(&mut self) -> &mut [u16] {
        bytemuck::cast_slice_mut(self.bytes_mut())
    }
}

/// A region of counters that threads share.
pub struct Words {
    region: Region,
}

impl Words {
    /// # Panics
    /// If the region is not whole aligned words.
    pub fn new(region: Region) -> Words {
        assert!(region.len.is_multiple_of(8) && region.start.cast::<AtomicU64>().is_aligned());
        Words { region }
    }

    pub fn get(&self) -> &[AtomicU64] {
        // SAFETY: as in `Region::bytes`; aligned, as asserted; and nothing but these atomics reaches the bytes, since
        // the region is ours and has no other accessor from here on.
        unsafe { std::slice::from_raw_parts(self.region.start.cast(), self.region.len / 8) }
    }

    /// Where the first one lies in its mapping.
    pub fn offset(&self) -> usize {
        self.region.offset()
    }
}

#[cfg(test)]
mod tests {
    use crate::{memory::Slab, threads::Pool};

    #[test]
    fn regions_are_zeroed_disjoint_and_outlive_the_slab() {
        let sizes = [4, 0, 100, 64];
        let slab = Slab::allocate(Slab::bytes_for(sizes)).unwrap();
        let mut regions = slab.carve(&sizes, &Pool::new(2).unwrap()).unwrap();
        for (value, region) in regions.iter_mut().enumerate() {
            assert!(region.bytes().iter().all(|&byte| byte == 0));
            region.bytes_mut().fill(value as u8 + 1);
        }
        for (value, region) in regions.iter().enumerate() {
            assert_eq!(region.bytes().len(), sizes[value]);
            assert!(region.bytes().iter().all(|&byte| byte == value as u8 + 1));
        }
    }
}
