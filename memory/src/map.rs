//! Mappings of this process: every call of mmap, munmap and madvise.

use std::{
    fs::File,
    io,
    ops::Range,
    os::fd::{AsFd, AsRawFd},
    ptr,
};

use rustix::fs::{FallocateFlags, fallocate};

/// Size of a huge page. A large mapping starts at a multiple of this size, and with the first byte of its file. Only
/// then does the kernel map huge pages.
pub(super) const HUGE_PAGE_BYTES: usize = 2 * 1024 * 1024;

/// Number of the advice to collapse pages, which the crate libc names for glibc alone.
const MADV_COLLAPSE: libc::c_int = 25;

/// Bytes that stay mapped, at the same address, while the value lives.
pub(super) struct Map {
    start: *mut u8,
    len: usize,
    is_file: bool,
    /// The file whose space is reserved part by part.
    kept: Option<File>,
    /// Address space that contains the bytes, and no other mapping.
    reserved: (*mut u8, usize),
}

// SAFETY: a map owns its mapping, which belongs to the process and not to a thread.
unsafe impl Send for Map {}
// SAFETY: a shared map reads and writes no byte, except by unsafe code of its caller.
unsafe impl Sync for Map {}

impl Map {
    pub(super) fn anonymous(len: usize) -> io::Result<Map> {
        Map::new(len, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1)
    }

    /// Maps memory that may exceed the host's: a page counts from its first use on.
    pub(super) fn sparse(len: usize) -> io::Result<Map> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        Map::new(len, libc::PROT_READ | libc::PROT_WRITE, flags, -1)
    }

    /// Maps the first bytes of a file to be read and written.
    pub(super) fn file(file: impl AsFd, len: usize) -> io::Result<Map> {
        let file = file.as_fd().as_raw_fd();
        Map::new(len, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED, file)
    }

    /// Maps the first bytes of a file that outlives the process. Its space is [reserved](Map::reserve) part by part.
    pub(super) fn kept(file: File, len: usize) -> io::Result<Map> {
        let mut map = Map::file(&file, len)?;
        map.kept = Some(file);
        Ok(map)
    }

    /// Maps the first bytes of a file to be read.
    pub(super) fn read_only(file: impl AsFd, len: usize) -> io::Result<Map> {
        Map::new(len, libc::PROT_READ, libc::MAP_SHARED, file.as_fd().as_raw_fd())
    }

    /// Maps a part of address space that is reserved first. The kernel by itself aligns few mappings to huge pages.
    fn new(len: usize, access: i32, flags: i32, file: i32) -> io::Result<Map> {
        let slack = if len >= HUGE_PAGE_BYTES { HUGE_PAGE_BYTES } else { 0 };
        let (space, nothing) = (len.saturating_add(slack), libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: the kernel chooses a place where nothing is mapped.
        let reserved = unsafe {
            libc::mmap(ptr::null_mut(), space, libc::PROT_NONE, nothing | libc::MAP_NORESERVE, -1, 0)
        };
        if reserved == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let reserved = reserved.cast::<u8>();
        let before = if slack > 0 { reserved.align_offset(HUGE_PAGE_BYTES) } else { 0 };
        let map = Map {
            start: reserved.wrapping_add(before),
            len,
            is_file: file >= 0,
            kept: None,
            reserved: (reserved, space),
        };
        // SAFETY: the bytes are inside the reservation, which is this value's own.
        let mapped = unsafe { libc::mmap(map.start.cast(), len, access, flags | libc::MAP_FIXED, file, 0) };
        if mapped == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(map) }
    }

    pub(super) fn as_ptr(&self) -> *const u8 {
        self.start
    }

    pub(super) fn as_mut_ptr(&self) -> *mut u8 {
        self.start
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Asks for huge pages where pages are touched from now on.
    pub(super) fn prefer_huge_pages(&self) -> io::Result<()> {
        // SAFETY: no byte changes.
        unsafe { self.advise(libc::MADV_HUGEPAGE, 0..self.len) }
    }

    /// Reserves the file's space for a range, in a mapping of a file that outlives the process. Other mappings need no
    /// reservation. Existing bytes stay.
    pub(super) fn reserve(&self, range: Range<usize>) -> io::Result<()> {
        match &self.kept {
            Some(file) if !range.is_empty() => {
                let (start, bytes) = (range.start as u64, range.len() as u64);
                fallocate(file, FallocateFlags::empty(), start, bytes).map_err(io::Error::from)
            }
            _ => Ok(()),
        }
    }

    /// Touches pages, so that no later step pays for a page fault. A file in memory gets huge pages where a whole huge
    /// page fits.
    pub(super) fn populate(&self, range: Range<usize>) -> io::Result<()> {
        let whole = range.start.next_multiple_of(HUGE_PAGE_BYTES)..range.end - range.end % HUGE_PAGE_BYTES;
        if self.is_file
            && !whole.is_empty()
            && let Err(error) = self.collapse(whole)
        {
            tracing::debug!(%error, "no huge pages in shared memory");
        }
        // SAFETY: no byte changes.
        unsafe { self.advise(libc::MADV_POPULATE_WRITE, range) }
    }

    /// Replaces small pages of a file in memory by huge ones, since Linux 6.1. By default the kernel gives such a file
    /// no huge pages by itself (`shmem_enabled`). Missing pages are zeroed at 17 GB/s this way, and at 1.4 GB/s by page
    /// faults.
    fn collapse(&self, range: Range<usize>) -> io::Result<()> {
        // SAFETY: no byte changes.
        unsafe {
            // The kernel makes a huge page only where at least one small page is in use.
            for start in range.clone().step_by(HUGE_PAGE_BYTES) {
                self.advise(libc::MADV_POPULATE_WRITE, start..start + 1)?;
            }
            self.advise(MADV_COLLAPSE, range)
        }
    }

    /// Gives the whole pages of a range back to the kernel. The bytes are 0 afterwards, in every mapping of a file.
    ///
    /// # Safety
    /// Nobody else in this process uses these bytes.
    pub(super) unsafe fn remove(&self, range: Range<usize>) -> io::Result<()> {
        let page = rustix::param::page_size();
        let whole = range.start.next_multiple_of(page)..range.end - range.end % page;
        if whole.start >= whole.end {
            return Ok(());
        }
        let advice = if self.is_file { libc::MADV_REMOVE } else { libc::MADV_DONTNEED };
        // SAFETY: what the caller keeps.
        unsafe { self.advise(advice, whole) }
    }

    /// Advises about all pages that have a byte of the range.
    ///
    /// # Safety
    /// Nobody else in this process uses bytes that the advice changes.
    unsafe fn advise(&self, advice: libc::c_int, range: Range<usize>) -> io::Result<()> {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {} bytes", self.len);
        let start = range.start - range.start % rustix::param::page_size();
        // SAFETY: inside the mapping, which starts with a page.
        let failed = unsafe { libc::madvise(self.start.add(start).cast(), range.end - start, advice) };
        if failed == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: the address space is this value's own, and borrows of its bytes have ended.
        let failed = unsafe { libc::munmap(self.reserved.0.cast(), self.reserved.1) };
        debug_assert_eq!(failed, 0, "{}", io::Error::last_os_error());
    }
}
