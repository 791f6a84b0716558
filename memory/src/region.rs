//! Exclusive parts of mappings, as bytes or as words, and version stamps for readers of other processes.

use std::{
    io,
    ops::Range,
    sync::{
        Arc,
        atomic::{
            AtomicU64,
            Ordering::{self, SeqCst},
        },
    },
};

use super::{AllocationError, SharedBytes, map::Map};

/// Owns its bytes as a `Box<[u8]>` would, but inside a mapping that lives until its last region is dropped.
///
/// Only the region's owner writes these bytes or borrows them. Two kinds of readers do not borrow: the kernel, for a
/// socket ([`SharedBytes`]), and processes that have the mapping's file. A checksum or a version stamp tells such
/// readers that the owner wrote during their read.
pub struct Region {
    start: *mut u8,
    len: usize,
    map: Arc<Map>,
}

// SAFETY: a region has exclusive access to its bytes in this process. A move to another thread moves that access, as
// for a Box. `Slab::cut` gives `Region::new` disjoint ranges, and a region that is split loses the bytes split off.
unsafe impl Send for Region {}
// SAFETY: through a shared reference bytes can only be read.
unsafe impl Sync for Region {}

/// The whole mapping that a region is part of, kept alive.
#[derive(Clone)]
pub struct Mapping {
    _map: Arc<Map>,
}

impl Region {
    /// Returns bytes that are sent after the borrow has ended. The region's owner may overwrite them before they are
    /// sent.
    ///
    /// # Panics
    /// If the range is not inside.
    pub fn share(&self, within: Range<usize>) -> SharedBytes {
        let bytes = &self.bytes()[within];
        SharedBytes::new(bytes.as_ptr(), bytes.len(), Arc::clone(&self.map))
    }

    /// The caller gives each byte of the mapping to at most one region.
    pub(super) fn new(map: Arc<Map>, start: usize, len: usize) -> Region {
        assert!(start + len <= map.len());
        // SAFETY: start is inside the mapping, as just asserted.
        let start = unsafe { map.as_mut_ptr().add(start) };
        Region { start, len, map }
    }

    pub(super) fn whole(map: Map) -> Region {
        let len = map.len();
        Region::new(Arc::new(map), 0, len)
    }

    /// Splits off the first `bytes` bytes as a region of their own.
    ///
    /// # Panics
    /// If this region has fewer bytes.
    pub fn split_off_front(&mut self, bytes: usize) -> Region {
        assert!(bytes <= self.len, "{bytes} bytes of {}", self.len);
        let front = Region { start: self.start, len: bytes, map: Arc::clone(&self.map) };
        // SAFETY: inside the mapping, as just asserted.
        self.start = unsafe { self.start.add(bytes) };
        self.len -= bytes;
        front
    }

    /// Gives the region's whole pages back to the kernel, until something is written there again. The bytes are then 0,
    /// in every mapping of a file.
    pub fn give_back(&mut self) -> io::Result<()> {
        // SAFETY: &mut self makes the access exclusive, and zeros are valid bytes.
        unsafe { self.map.remove(self.place()) }
    }

    /// Reserves the region's space in a file that outlives the process. Without the reservation, a store to a page that
    /// the file system cannot give would kill the process. Existing bytes stay.
    pub fn reserve(&self) -> Result<(), AllocationError> {
        let bytes = self.len;
        self.map.reserve(self.place()).map_err(|source| AllocationError { bytes, source })
    }

    /// Touches the pages before their first use.
    pub fn populate(&self) {
        if let Err(error) = self.map.populate(self.place()) {
            tracing::debug!(%error, "could not touch memory ahead of its use");
        }
    }

    fn place(&self) -> Range<usize> {
        self.offset()..self.offset() + self.len
    }

    pub fn mapping(&self) -> Mapping {
        Mapping { _map: Arc::clone(&self.map) }
    }

    pub fn offset(&self) -> usize {
        self.start.addr() - self.map.as_ptr().addr()
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping is alive and initialised, since new pages are zero. Only `self` can write this range,
        // and it is borrowed.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`; &mut self makes the access exclusive in this process. Reads of the kernel and of other
        // processes are no accesses of Rust's.
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

    pub fn u16_mut(&mut self) -> &mut [u16] {
        bytemuck::cast_slice_mut(self.bytes_mut())
    }
}

/// A region of 64-bit words that threads share.
pub struct AtomicWords {
    region: Region,
}

impl AtomicWords {
    /// # Panics
    /// If the region is not whole aligned words.
    pub fn new(region: Region) -> AtomicWords {
        assert!(region.len.is_multiple_of(8) && region.start.cast::<AtomicU64>().is_aligned());
        AtomicWords { region }
    }

    pub fn get(&self) -> &[AtomicU64] {
        // SAFETY: as in `Region::bytes`, and aligned, as asserted. Only these atomics reach the bytes: the region is
        // private, and no other method uses it.
        unsafe { std::slice::from_raw_parts(self.region.start.cast(), self.region.len / 8) }
    }

    /// Sets a stamp: to 0 before its bytes are written, and to another value afterwards.
    pub fn publish(&self, index: usize, value: u64) {
        publish(&self.get()[index], value);
    }

    pub fn offset(&self) -> usize {
        self.region.offset()
    }
}

/// A version stamp beside bytes whose readers take no lock: an atomic of std, or of loom in a model. Bytes read between
/// two equal stamps are of that version.
///
/// The writer sets the stamp to 0 before it changes the first byte. Once the last byte is written, the writer sets the
/// version's stamp. A reader looks at the stamp, reads, and looks again.
pub(crate) trait Stamp {
    fn load(&self, order: Ordering) -> u64;
    fn store(&self, value: u64, order: Ordering);
    fn fence(order: Ordering);
}

macro_rules! stamp {
    ($type:ty, $fence:path) => {
        impl Stamp for $type {
            fn load(&self, order: Ordering) -> u64 {
                self.load(order)
            }

            fn store(&self, value: u64, order: Ordering) {
                self.store(value, order);
            }

            fn fence(order: Ordering) {
                $fence(order);
            }
        }
    };
}

stamp!(AtomicU64, std::sync::atomic::fence);
#[cfg(loom)]
stamp!(loom::sync::atomic::AtomicU64, loom::sync::atomic::fence);

/// Sets the stamp, after all earlier writes of bytes and before all later ones.
///
/// The fences are sequentially consistent, since kernels write past the cache, which plain release does not
/// order.
pub(crate) fn publish<S: Stamp>(stamp: &S, value: u64) {
    S::fence(SeqCst);
    stamp.store(value, Ordering::Release);
    S::fence(SeqCst);
}

/// Returns the stamp, after all earlier reads of bytes and before all later ones.
///
/// The load is relaxed: readers map stamps read-only, and Rust allows only relaxed loads from such memory.
pub(crate) fn look<S: Stamp>(stamp: &S) -> u64 {
    S::fence(SeqCst);
    let value = stamp.load(Ordering::Relaxed);
    S::fence(SeqCst);
    value
}

#[cfg(all(test, not(loom)))]
mod tests {
    use crate::{Slab, slab::tests::Shares};

    #[test]
    fn regions_are_zeroed_disjoint_and_outlive_the_slab() {
        let sizes = [4, 0, 100, 64];
        let slab = Slab::allocate(Slab::bytes_for(sizes)).unwrap();
        let mut regions = slab.carve(&sizes, &Shares(2)).unwrap();
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
