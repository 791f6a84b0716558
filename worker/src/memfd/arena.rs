//! Memory for gradients that other processes can be given to read.

#![allow(unsafe_code)]

use std::{
    collections::HashMap,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use longshore_proto::wire::memfd::MAX_MEMORY_BYTES;
use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, ftruncate, memfd_create,
};

/// The first extent; each later one is twice the one before, so that few descriptors do for any size. Address space
/// alone: a page is allocated when it is first written.
const FIRST_EXTENT_BYTES: usize = 64 * 1024 * 1024;
/// Pieces are whole pages, so that a freed one can be given back.
const PAGE_BYTES: usize = 4096;

/// Hands out pieces of its extents. Clones share them.
#[derive(Clone, Default)]
pub(crate) struct Arena(Arc<Mutex<Space>>);

#[derive(Default)]
struct Space {
    extents: Vec<Arc<Extent>>,
    /// Bytes of the last extent that were handed out once.
    used: usize,
    /// Pieces given back, by length.
    free: HashMap<usize, Vec<(Arc<Extent>, usize)>>,
}

/// One memfd, mapped. It goes with its last piece and its arena.
pub(crate) struct Extent {
    /// Tells extents of this process apart.
    pub(crate) id: u64,
    file: OwnedFd,
    map: MmapRaw,
}

/// Bytes that nobody else in this process reaches. No other process writes them: servers, of the same user, map them
/// to read.
pub(crate) struct Piece {
    extent: Arc<Extent>,
    offset: usize,
    bytes: usize,
    arena: Arena,
    abandoned: bool,
}

impl Extent {
    fn create(bytes: usize) -> io::Result<Extent> {
        static IDS: AtomicU64 = AtomicU64::new(1);
        let file = memfd_create("longshore-gradients", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, bytes as u64)?;
        // A server maps only what cannot be taken away under it.
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let map = MmapOptions::new().len(bytes).map_raw(&file)?;
        Ok(Extent { id: IDS.fetch_add(1, Ordering::Relaxed), file, map })
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.map.len() as u64
    }
}

impl AsFd for Extent {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Arena {
    fn lock(&self) -> MutexGuard<'_, Space> {
        // Every change leaves whole pieces.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A piece of `bytes`, zero or as its last user left it.
    pub(crate) fn take(&self, bytes: usize) -> io::Result<Piece> {
        let length = bytes.next_multiple_of(PAGE_BYTES);
        let mut space = self.lock();
        if let Some((extent, offset)) = space.free.get_mut(&length).and_then(Vec::pop) {
            return Ok(Piece { extent, offset, bytes, arena: self.clone(), abandoned: false });
        }
        let room = space.extents.last().map_or(0, |extent| extent.map.len() - space.used);
        if room < length {
            let last = space.extents.last().map_or(FIRST_EXTENT_BYTES / 2, |extent| extent.map.len());
            let most = MAX_MEMORY_BYTES as usize;
            let extent = Extent::create((2 * last).min(most).max(length))?;
            space.extents.push(Arc::new(extent));
            space.used = 0;
        }
        let offset = space.used;
        space.used += length;
        // There is one: else there was no room, and one was made.
        let extent = space.extents.last().map(Arc::clone).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Piece { extent, offset, bytes, arena: self.clone(), abandoned: false })
    }
}

impl Piece {
    /// Where it lies.
    pub(crate) fn place(&self) -> (Arc<Extent>, u64) {
        (Arc::clone(&self.extent), self.offset as u64)
    }

    /// Leaves its bytes as they are, for other processes, until nobody maps the extent any more.
    pub(crate) fn abandon(mut self) {
        self.abandoned = true;
    }
}

impl AsRef<[u8]> for Piece {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: inside the mapping, which lives as long as the extent; `take` gives each byte to one piece at a time, so
        // that nobody writes while this borrow lasts.
        unsafe { std::slice::from_raw_parts(self.extent.map.as_ptr().add(self.offset), self.bytes) }
    }
}

impl AsMut<[u8]> for Piece {
    fn as_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_ref`; &mut self makes the access exclusive. A server that still reads an older gradient here
        // gets other bytes than it was told the checksum of, and refuses them.
        unsafe { std::slice::from_raw_parts_mut(self.extent.map.as_mut_ptr().add(self.offset), self.bytes) }
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        if self.abandoned {
            return;
        }
        let length = self.bytes.next_multiple_of(PAGE_BYTES);
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        if let Err(error) = fallocate(&self.extent.file, flags, self.offset as u64, length as u64) {
            tracing::debug!(%error, "could not give memory back");
        }
        let place = (Arc::clone(&self.extent), self.offset);
        self.arena.lock().free.entry(length).or_default().push(place);
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::fstat;

    use super::*;

    #[test]
    fn pieces_are_apart_and_given_back() {
        let arena = Arena::default();
        let mut pieces: Vec<Piece> = (1..100).map(|index| arena.take(index * 1000).unwrap()).collect();
        for (index, piece) in pieces.iter_mut().enumerate() {
            piece.as_mut().fill(index as u8);
        }
        for (index, piece) in pieces.iter().enumerate() {
            assert_eq!(piece.as_ref().len(), (index + 1) * 1000);
            assert!(piece.as_ref().iter().all(|&byte| byte == index as u8));
        }
        let (extent, offset) = pieces[98].place();
        pieces.clear();
        assert_eq!(fstat(&extent).unwrap().st_blocks, 0, "its pages are free");
        assert_eq!(arena.take(99_000).unwrap().place().1, offset);
    }

    #[test]
    fn extents_grow_as_needed() {
        let arena = Arena::default();
        let pieces: Vec<Piece> = (0..3).map(|_| arena.take(40 << 20).unwrap()).collect();
        let sizes: Vec<u64> = pieces.iter().map(|piece| piece.place().0.bytes()).collect();
        assert_eq!(sizes, [64 << 20, 128 << 20, 128 << 20]);
    }
}
