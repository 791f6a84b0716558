//! Memory that this process writes, and that other processes may map to read.

use std::{
    fs::File,
    io,
    os::fd::{AsFd, BorrowedFd},
};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

use super::{Region, map::Map};

/// A file without a name, mapped here. A process that is given the file may map and read it, and cannot change its
/// size.
pub struct SharedFile {
    file: File,
    bytes: usize,
}

impl SharedFile {
    /// Creates a file that no other process can write. Once the file is mapped here, file seals forbid writes by
    /// others, whatever rights they have.
    pub(super) fn sealed(bytes: usize) -> io::Result<(Map, SharedFile)> {
        SharedFile::create("longshore-images", bytes, SealFlags::FUTURE_WRITE)
    }

    /// Creates memory whose pages can be given back ([`Region::give_back`]). The kernel treats the return of a page as
    /// a write, which a seal against writers would forbid. Only processes of the same user get the file, and they may
    /// write to this process anyway.
    pub fn lendable(bytes: usize) -> io::Result<(Region, SharedFile)> {
        let (map, file) = SharedFile::create("longshore-gradients", bytes, SealFlags::empty())?;
        Ok((Region::whole(map), file))
    }

    fn create(name: &str, bytes: usize, seals: SealFlags) -> io::Result<(Map, SharedFile)> {
        let file = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, bytes as u64)?;
        let file = File::from(file);
        let map = Map::file(&file, bytes)?;
        fcntl_add_seals(&file, seals | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
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

#[cfg(all(test, not(loom)))]
mod tests {
    use std::{
        fs::{File, OpenOptions},
        os::fd::{AsFd, AsRawFd},
    };

    use crate::{
        Foreign, SharedFile, Slab,
        map::{HUGE_PAGE_BYTES, Map},
        slab::tests::{Shares, bytes_of},
    };

    #[test]
    fn others_see_what_is_written_and_cannot_write() {
        let (slab, shared) = Slab::allocate_shared(10_000).unwrap();
        let mut regions = slab.carve(&[64, 5000], &Shares(1)).unwrap();
        let file = File::from(shared.as_fd().try_clone_to_owned().unwrap());
        let reader = Foreign::map(&file, 10_000, 10_000).unwrap();
        regions[1].bytes_mut().fill(7);
        let start = regions[1].offset() as u64;
        let mut seen = [0; 5001];
        reader.source(start - 1, 5001).copy_to(&mut seen);
        assert!(seen[0] == 0 && seen[1..].iter().all(|&byte| byte == 7));
        assert_eq!(shared.bytes(), 10_000);

        // The seals hold also for the owner, who opens the file anew.
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let again = OpenOptions::new().read(true).write(true).open(path).unwrap();
        assert!(Map::file(&again, 10_000).is_err());
        assert!(std::io::Write::write(&mut &again, &[1]).is_err());
        assert!(again.set_len(1).is_err());
        assert!(again.set_len(1 << 20).is_err());
    }

    /// Only half of the third huge page belongs to the region.
    #[test]
    fn both_ends_map_huge_pages_where_the_kernel_has_them() {
        let bytes = 3 * HUGE_PAGE_BYTES;
        let (mut rest, file) = SharedFile::lendable(bytes).unwrap();
        let mut region = rest.split_off_front(bytes - HUGE_PAGE_BYTES / 2);
        let reader = Foreign::map(&file, bytes as u64, bytes as u64).unwrap();
        region.bytes_mut()[HUGE_PAGE_BYTES - 1] = 7;
        region.populate();
        let blocks = rustix::fs::fstat(&file).unwrap().st_blocks as usize * 512;
        assert_eq!(blocks, region.bytes().len(), "all of the region's pages and no others");
        assert!(
            region.bytes().iter().enumerate().all(|(at, &byte)| (byte == 7) == (at == HUGE_PAGE_BYTES - 1))
        );
        let mut seen = vec![0; bytes];
        reader.source(0, bytes as u64).copy_to(&mut seen);
        assert!(seen[HUGE_PAGE_BYTES - 1] == 7);
        // Kernels before 6.1, or without a free huge page, leave small pages.
        let huge =
            [region.bytes().as_ptr().addr(), reader.address(0, 1)].map(|at| bytes_of("ShmemPmdMapped:", at));
        assert!(huge == [2 * HUGE_PAGE_BYTES; 2] || huge == [0; 2], "{huge:?}");
    }

    #[test]
    fn pages_given_back_are_free_and_zero() {
        let (mut rest, file) = SharedFile::lendable(3 << 20).unwrap();
        let mut first = rest.split_off_front(1 << 20);
        first.bytes_mut().fill(1);
        rest.bytes_mut().fill(2);
        let blocks = || rustix::fs::fstat(&file).unwrap().st_blocks as usize * 512;
        assert_eq!(blocks(), 3 << 20);
        first.give_back().unwrap();
        assert_eq!(blocks(), 2 << 20);
        assert!(first.bytes().iter().all(|&byte| byte == 0));
        assert!(rest.bytes().iter().all(|&byte| byte == 2));
    }
}
