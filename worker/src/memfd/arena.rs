//! A worker's memory for gradients, which servers of its host can be given to read.

use std::{
    collections::HashMap,
    io,
    ops::Range,
    os::fd::{AsFd, BorrowedFd},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use longshore_memory::{Mapping, Region, SharedFile};
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
    /// The addresses of all pieces that were cut.
    cut: Vec<Range<usize>>,
    /// How many [`GradientMemory`] there are. While there is one, pieces keep their pages.
    users: usize,
}

/// One memfd. Its descriptor and its mapping go with its last piece and its arena.
pub(crate) struct Extent {
    /// Tells extents of this process apart.
    pub(crate) id: u64,
    file: SharedFile,
    _map: Mapping,
}

/// The memory that a rank's gradients leave from, for a device that copies them there itself. While this is there, all of it stays
/// where it is and keeps its pages, those of pieces at rest too, which count in no budget. The device may have them page-locked: a page
/// that was given back would be another one for the device than for servers.
pub struct GradientMemory(Arena);

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
        let _map = region.mapping();
        Ok((Extent { id: IDS.fetch_add(1, Ordering::Relaxed), file, _map }, region))
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
            None => {
                let (extent, region) = space.cut(length)?;
                let start = region.bytes().as_ptr().addr();
                space.cut.push(start..start + length);
                (extent, region)
            }
        };
        Ok(Piece { extent, region: Some(region), bytes, arena: self.clone() })
    }

    /// Has all memory keep its pages as long as what is returned is there.
    pub(crate) fn kept(&self) -> GradientMemory {
        self.lock().users += 1;
        GradientMemory(self.clone())
    }
}

impl GradientMemory {
    /// The addresses of its pieces, whole pages each, without the first `known` of them. A piece that is used again is the same one.
    pub fn pieces(&self, known: usize) -> Vec<Range<usize>> {
        self.0.lock().cut.iter().skip(known).cloned().collect()
    }
}

impl Drop for GradientMemory {
    fn drop(&mut self) {
        self.0.lock().users -= 1;
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
        // Under the lock, so that nobody page-locks what is being given back.
        let mut space = self.arena.lock();
        if space.users == 0
            && let Err(error) = region.give_back()
        {
            tracing::debug!(%error, "could not give memory back");
        }
        let (length, extent) = (region.bytes().len(), Arc::clone(&self.extent));
        space.free.entry(length).or_default().push((extent, region));
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
    fn pieces_keep_their_pages_while_a_device_uses_them() {
        let arena = Arena::default();
        let mut first = arena.take(5000).unwrap();
        let kept = arena.kept();
        first.as_mut().fill(1);
        let (extent, start) = (first.place().0, first.as_ref().as_ptr().addr());
        assert_eq!(kept.pieces(0), vec![start..start + 2 * PAGE_BYTES]);
        drop(first);
        assert_ne!(fstat(&extent).unwrap().st_blocks, 0, "its pages stay");
        let again = arena.take(5001).unwrap();
        assert_eq!((again.as_ref().as_ptr().addr(), kept.pieces(1)), (start, vec![]));
        drop(kept);
        drop(again);
        assert_eq!(fstat(&extent).unwrap().st_blocks, 0, "its pages are free");
    }

    #[test]
    fn extents_grow_as_needed() {
        let arena = Arena::default();
        let pieces: Vec<Piece> = (0..3).map(|_| arena.take(40 << 20).unwrap()).collect();
        let sizes: Vec<u64> = pieces.iter().map(|piece| piece.place().0.bytes()).collect();
        assert_eq!(sizes, [64 << 20, 128 << 20, 128 << 20]);
    }
}
