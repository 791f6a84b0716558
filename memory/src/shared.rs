//! Bytes that another thread of this process may overwrite, held as an address from which the kernel reads.

use std::{
    any::Any,
    io::{self, Error},
    ops::Range,
    os::fd::{AsFd, AsRawFd},
    sync::Arc,
};

use super::map::Map;

/// A part of a [`Region`](super::Region) that is sent while the region's owner may write it.
///
/// Rust code cannot read these bytes soundly. The owner writes them with ordinary stores. A load that races with such a
/// store is undefined behaviour, even an atomic load. So this type only gives their address to a system call
/// ([`write_parts`]). The kernel reads each byte as it is just then, which is no access of this program. A receiver
/// accepts the bytes only with a checksum that was taken under the owner's lock.
///
/// Code of this process that needs the bytes copies them from the region, under the owner's lock.
#[derive(Clone)]
pub struct SharedBytes {
    start: *const u8,
    len: usize,
    /// Keeps the bytes mapped.
    map: Arc<Map>,
    /// A further value that must live while the bytes are sent.
    held: Option<Arc<dyn Any + Send + Sync>>,
}

// SAFETY: the mapping may be used from any thread, and its address goes to the kernel alone.
unsafe impl Send for SharedBytes {}
// SAFETY: the reason above holds for shared use too.
unsafe impl Sync for SharedBytes {}

impl SharedBytes {
    /// `start` and `len` must describe bytes inside the mapping.
    pub(super) fn new(start: *const u8, len: usize, map: Arc<Map>) -> SharedBytes {
        SharedBytes { start, len, map, held: None }
    }

    /// Keeps `what` alive as long as the result and its clones.
    #[must_use]
    pub fn holding(self, what: Arc<dyn Any + Send + Sync>) -> SharedBytes {
        SharedBytes { held: Some(what), ..self }
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// # Panics
    /// If the range is not inside.
    #[must_use]
    pub fn slice(&self, range: Range<usize>) -> SharedBytes {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {} bytes", self.len);
        // SAFETY: the range is inside, as was just asserted.
        let start = unsafe { self.start.add(range.start) };
        SharedBytes {
            start,
            len: range.end - range.start,
            map: Arc::clone(&self.map),
            held: self.held.clone(),
        }
    }
}

/// Piece of a gathered write.
#[derive(Clone)]
pub enum Part<'a> {
    Own(&'a [u8]),
    Shared(SharedBytes),
}

impl Part<'_> {
    pub fn len(&self) -> usize {
        match self {
            Part::Own(bytes) => bytes.len(),
            Part::Shared(bytes) => bytes.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Largest number of parts that one call writes. Further parts are left for the next call.
pub const MOST_PARTS: usize = 64;

/// Writes to a socket, a pipe or a file, as `writev` does. Returns the number of bytes taken.
pub fn write_parts(to: impl AsFd, parts: &[Part<'_>]) -> io::Result<usize> {
    let mut vectors = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; MOST_PARTS];
    let count = parts.len().min(MOST_PARTS);
    for (vector, part) in vectors.iter_mut().zip(parts) {
        let (start, len) = match part {
            Part::Own(bytes) => (bytes.as_ptr(), bytes.len()),
            Part::Shared(bytes) => (bytes.start, bytes.len),
        };
        *vector = libc::iovec { iov_base: start.cast_mut().cast(), iov_len: len };
    }
    // SAFETY: the descriptor is open; every vector is readable memory that `parts` keeps alive; writev writes none of
    // it.
    let written = unsafe { libc::writev(to.as_fd().as_raw_fd(), vectors.as_ptr(), count as libc::c_int) };
    if written < 0 { Err(Error::last_os_error()) } else { Ok(written as usize) }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::io::Read;

    use super::*;
    use crate::SharedFile;

    /// writev sends shared bytes as they are during the call, in order with the caller's own bytes.
    #[test]
    fn the_kernel_reads_what_is_there_when_it_reads() {
        let (mut region, _file) = SharedFile::lendable(8192).unwrap();
        let bytes = region.share(4000..4100);
        let held = Arc::new(());
        let last = bytes.slice(90..100).holding(held.clone());
        region.bytes_mut().fill(7);
        drop(region);
        let (mut reader, writer) = std::io::pipe().unwrap();
        let parts = [Part::Own(b"head"), Part::Shared(bytes), Part::Own(b""), Part::Shared(last)];
        assert_eq!(write_parts(&writer, &parts).unwrap(), 114);
        assert_eq!(Arc::strong_count(&held), 2);
        drop((writer, parts));
        let mut seen = Vec::new();
        reader.read_to_end(&mut seen).unwrap();
        assert!(seen.starts_with(b"head") && seen.len() == 114 && seen[4..].iter().all(|&byte| byte == 7));
        assert_eq!(Arc::strong_count(&held), 1);
    }

    #[test]
    fn more_parts_than_one_call_takes_are_left_for_the_next() {
        let (_reader, writer) = std::io::pipe().unwrap();
        let parts: Vec<Part<'_>> = (0..MOST_PARTS + 1).map(|_| Part::Own(b"12")).collect();
        assert_eq!(write_parts(&writer, &parts).unwrap(), 2 * MOST_PARTS);
    }
}
