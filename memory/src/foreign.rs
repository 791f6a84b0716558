//! Memory of another process, mapped to be read. Any byte of it may change at any moment.

use std::{os::fd::AsFd, sync::atomic::AtomicU64};

use rustix::fs::{SealFlags, fcntl_get_seals, fstat, fstatfs};

use super::{Source, map::Map, region::look};

/// File system type that fstatfs reports for a memfd without huge pages of its own. A memfd of huge pages is refused:
/// on a host without a free huge page, reading it kills this process.
const TMPFS_MAGIC: i64 = 0x0102_1994;

/// A memfd with file seals, mapped read-only. Its owner may change every byte at any moment, and may free pages, which
/// then read as 0. The seals keep the file's size, so no read fails. No reference points to its bytes: see [`Source`].
/// The owner may be this process, which then writes through another mapping at other addresses.
pub struct Foreign {
    map: Map,
}

/// Fault of a descriptor that cannot be mapped safely.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{found} passed as shared memory, must be {limit}")]
pub struct ForeignError {
    pub found: String,
    pub limit: String,
}

impl Foreign {
    /// Maps a memfd of another process.
    ///
    /// # Errors
    /// Unless the descriptor is a memfd of exactly `bytes`, at most `most`, that cannot shrink.
    pub fn map(descriptor: impl AsFd, bytes: u64, most: u64) -> Result<Foreign, ForeignError> {
        let descriptor = descriptor.as_fd();
        let invalid = |found: String, limit: &str| ForeignError { found, limit: limit.into() };
        let failed = |error: rustix::io::Errno| invalid(error.to_string(), "a memfd");
        if bytes == 0 || bytes > most {
            return Err(invalid(format!("{bytes} bytes"), &format!("1 to {most} bytes")));
        }
        let kind = fstatfs(descriptor).map_err(failed)?.f_type;
        if kind as i64 != TMPFS_MAGIC {
            return Err(invalid(format!("a file of type {kind:#x}"), "a memfd without MFD_HUGETLB"));
        }
        let seals = fcntl_get_seals(descriptor).map_err(failed)?;
        if !seals.contains(SealFlags::SHRINK | SealFlags::GROW) {
            return Err(invalid(
                format!("seals {:#x}", seals.bits()),
                "sealed against shrinking and growing",
            ));
        }
        let size = fstat(descriptor).map_err(failed)?.st_size;
        if size as u64 != bytes {
            return Err(invalid(format!("{size} bytes"), &format!("{bytes}, as announced")));
        }
        let map = Map::read_only(descriptor, bytes as usize);
        Ok(Foreign { map: map.map_err(|error| invalid(error.to_string(), "mapped"))? })
    }

    pub fn len(&self) -> u64 {
        self.map.len() as u64
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns true if `bytes` from `offset` on lie inside the memory.
    pub fn holds(&self, offset: u64, bytes: u64) -> bool {
        offset.checked_add(bytes).is_some_and(|end| end <= self.len())
    }

    /// Returns the version stamp at `offset`. All writes that the owner made before the stamp are visible too.
    ///
    /// # Panics
    /// If it is not inside or not aligned.
    pub fn stamp(&self, offset: u64) -> u64 {
        assert!(self.holds(offset, 8) && offset.is_multiple_of(8), "the caller has checked the place");
        // SAFETY: inside the mapping and aligned; an atomic at both ends.
        let stamp = unsafe { AtomicU64::from_ptr(self.map.as_mut_ptr().add(offset as usize).cast()) };
        u64::from_le(look(stamp))
    }

    /// Returns the address of these bytes in this process, for a device that copies from there.
    ///
    /// # Panics
    /// If they are not inside.
    pub fn address(&self, offset: u64, bytes: u64) -> usize {
        assert!(self.holds(offset, bytes), "the caller has checked the place");
        self.map.as_ptr().addr() + offset as usize
    }

    /// Bytes to copy, or to compute with.
    ///
    /// # Panics
    /// If they are not inside.
    pub fn source(&self, offset: u64, bytes: u64) -> Source<'_, u8> {
        assert!(self.holds(offset, bytes), "the caller has checked the place");
        // SAFETY: inside the mapping, which lives as long as self. The file cannot shrink, so all of it is readable.
        // The mapping is read-only, and only `stamp` makes references to it, of atomics.
        unsafe { Source::of_another_process(self.map.as_ptr().add(offset as usize), bytes as usize) }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::{fs::File, os::fd::OwnedFd};

    use rustix::fs::{MemfdFlags, fcntl_add_seals, ftruncate, memfd_create};

    use super::*;

    fn memfd(bytes: u64, seals: SealFlags) -> OwnedFd {
        let descriptor = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&descriptor, bytes).unwrap();
        fcntl_add_seals(&descriptor, seals).unwrap();
        descriptor
    }

    #[test]
    fn only_a_sealed_memfd_of_the_announced_size_is_mapped() {
        let sealed = SealFlags::SHRINK | SealFlags::GROW;
        assert!(Foreign::map(memfd(4096, sealed), 4096, 4096).is_ok());
        let ordinary = OwnedFd::from(tempfile::tempfile().unwrap());
        let refused = [
            (memfd(4096, SealFlags::empty()), 4096, "seals"),
            (memfd(4096, SealFlags::SHRINK), 4096, "growing"),
            (memfd(4096, sealed), 8192, "8192, as announced"),
            (memfd(0, sealed), 0, "1 to"),
            (memfd(8192, sealed), 1 << 40, "1 to"),
            (ordinary, 4096, "memfd"),
            (OwnedFd::from(File::open("/dev/zero").unwrap()), 4096, "memfd"),
        ];
        for (descriptor, bytes, why) in refused {
            let error = Foreign::map(&descriptor, bytes, 1 << 30).err().expect(why);
            assert!(error.to_string().contains(why), "{error}");
        }
    }

    #[test]
    fn places_are_checked_to_the_last_byte() {
        let memory = Foreign::map(memfd(4096, SealFlags::SHRINK | SealFlags::GROW), 4096, 4096).unwrap();
        assert!(memory.holds(0, 4096) && memory.holds(4096, 0) && memory.holds(4095, 1));
        assert!(!memory.holds(4096, 1) && !memory.holds(1, 4096) && !memory.holds(u64::MAX, 2));
        let mut target = [1; 96];
        memory.source(4000, 96).copy_to(&mut target);
        assert_eq!((target, memory.stamp(4088)), ([0; 96], 0));
    }
}
