//! Memory that this process writes and others may map to read.

#![allow(unsafe_code)]

use std::{
    fs::File,
    io,
    os::fd::{AsFd, BorrowedFd},
};

use memmap2::{MmapMut, MmapOptions};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

/// A file without a name. Whoever gets it can map it and read, for as long as they like, and nobody can write to it or
/// change its size: sealed so once it was mapped here, which the kernel keeps to whatever its mode or their rights.
pub struct SharedFile {
    file: File,
    bytes: usize,
}

impl SharedFile {
    pub(super) fn create(bytes: usize) -> io::Result<(MmapMut, SharedFile)> {
        let file = memfd_create("longshore-images", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, bytes as u64)?;
        let file = File::from(file);
        // SAFETY: the file has no name and no other process has it yet; before one gets it, it is sealed against every
        // other writer and against shrinking. So only this mapping changes it, as with anonymous memory.
        let map = unsafe { MmapOptions::new().len(bytes).map_mut(&file) }?;
        fcntl_add_seals(
            &file,
            SealFlags::FUTURE_WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL,
        )?;
        Ok((map, SharedFile { file, bytes }))
    }

    pub fn bytes(&self) -> u64 {
        self.bytes as u64
    }
}

impl AsFd for SharedFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs::{File, OpenOptions},
        os::fd::{AsFd, AsRawFd},
    };

    use memmap2::{Mmap, MmapMut};

    use crate::{memory::Slab, threads::Pool};

    #[test]
    fn others_see_what_is_written_and_cannot_write() {
        let (slab, shared) = Slab::allocate_shared(10_000).unwrap();
        let mut regions = slab.carve(&[64, 5000], &Pool::new(1).unwrap()).unwrap();
        let file = File::from(shared.as_fd().try_clone_to_owned().unwrap());
        // SAFETY: read while nobody writes.
        let seen = unsafe { Mmap::map(&file) }.unwrap();
        regions[1].bytes_mut().fill(7);
        let start = regions[1].offset();
        assert!(seen[start..start + 5000].iter().all(|&byte| byte == 7));
        assert_eq!((seen[start - 1], shared.bytes()), (0, 10_000));

        // Opened anew, with whatever rights the owner has: it is the file that refuses.
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let again = OpenOptions::new().read(true).write(true).open(path).unwrap();
        // SAFETY: it is refused.
        assert!(unsafe { MmapMut::map_mut(&again) }.is_err());
        assert!(std::io::Write::write(&mut &again, &[1]).is_err());
        assert!(again.set_len(1).is_err());
        assert!(again.set_len(1 << 20).is_err());
    }
}
