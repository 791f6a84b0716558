//! A worker's memory for gradients, which servers of its host can be given to read.

use std::{
    collections::HashMap,
    io,
    os::fd::{AsFd, BorrowedFd},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use longshore_memory::{Region, SharedFile};
use longshore_wire::memfd::MAX_MEMORY_BYTES;

/// The size of the first extent. Each later one is twice the one before, so that few descriptors do for any size. It
/// is only address space: a page is allocated when it is first written.
const FIRST_EXTENT_BYTES: usize = 64 * 1024 * 1024;
/// Pieces are whole pages, so that a freed one can be given back.
const PAGE_BYTES: usize = 4096;

/// Hands out pieces of its extents. Clones share the extents.
#[derive(Clone, Default)]
pub(crate) struct Arena(Arc<Mutex<Space>>);

#[derive(Default)]
struct Space {
    extents: Vec<Arc<Extent>>,
    /// What the last extent has left.
    rest: Option<Region>,
    /// Pieces given back, by length.
    free: HashMap<usize, Vec<(Arc<Extent>, Region)>>,
}

/// One memfd. Its descriptor goes with its last piece and its arena.
pub(crate) struct Extent {
    /// Tells extents of this process apart.
    pub(crate) id: u64,
    file: SharedFile,
}

/// Bytes that nobody else in this process reaches. No other process writes them: servers of the same user map them to
/// read.
pub(crate) struct Piece {
    extent: Arc<Extent>,
    /// Whole pages. None only while dropping.
    region: Option<Region>,
    bytes: usize,
    arena: Arena,
}

impl Extent {
    fn create(bytes: usize) -> io::Result<(Extent, Region)> {
        static IDS: AtomicU64 = AtomicU64::new(1);
        let (region, file) = SharedFile::lendable(bytes)?;
        Ok((Extent { id: IDS.fetch_add(1, Ordering::Relaxed), file }, region))
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.file.bytes()
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
        let (extent, region) = match space.free.get_mut(&length).and_then(Vec::pop) {
            Some(found) => found,
            None => space.cut(length)?,
        };
        Ok(Piece { extent, region: Some(region), bytes, arena: self.clone() })
    }
}

impl Space {
    /// New memory, of a new extent where the last one has too little left.
    fn cut(&mut self, length: usize) -> io::Result<(Arc<Extent>, Region)> {
        if let (Some(extent), Some(rest)) = (self.extents.last(), &mut self.rest)
            && rest.bytes().len() >= length
        {
            return Ok((Arc::clone(extent), rest.split_off_front(length)));
        }
        let last = self.extents.last().map_or(FIRST_EXTENT_BYTES / 2, |extent| extent.bytes() as usize);
        let (extent, mut rest) = Extent::create((2 * last).min(MAX_MEMORY_BYTES as usize).max(length))?;
        let (extent, region) = (Arc::new(extent), rest.split_off_front(length));
        self.extents.push(Arc::clone(&extent));
        self.rest = Some(rest);
        Ok((extent, region))
    }
}

impl Piece {
    /// The extent that it lies in, and its offset there.
    pub(crate) fn place(&self) -> (Arc<Extent>, u64) {
        (Arc::clone(&self.extent), self.region.as_ref().map_or(0, |region| region.offset() as u64))
    }

    /// Leaves its bytes as they are, for other processes, until nobody maps the extent any more.
    pub(crate) fn abandon(mut self) {
        self.region = None;
    }
}

impl AsRef<[u8]> for Piece {
    fn as_ref(&self) -> &[u8] {
        self.region.as_ref().map_or(&[], |region| &region.bytes()[..self.bytes])
    }
}

/// A server that still reads an older gradient here gets other bytes than it was told the checksum of, and refuses them.
impl AsMut<[u8]> for Piece {
    fn as_mut(&mut self) -> &mut [u8] {
        self.region.as_mut().map_or(&mut [], |region| &mut region.bytes_mut()[..self.bytes])
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        let Some(mut region) = self.region.take() else { return };
        if let Err(error) = region.give_back() {
            tracing::debug!(%error, "could not give memory back");
        }
        let (length, extent) = (region.bytes().len(), Arc::clone(&self.extent));
        self.arena.lock().free.entry(length).or_default().push((extent, region));
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
