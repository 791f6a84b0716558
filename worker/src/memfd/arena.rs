//! Memory for a worker's gradients that servers of its host can map. A pool of buffers owns the arena. Any thread may
//! take and free pieces.

use std::{
    collections::HashMap,
    io,
    ops::Range,
    os::fd::{AsFd, BorrowedFd},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use longshore_memory::{Mapping, Region, SharedFile};
use longshore_wire::memfd::MAX_MEMORY_BYTES;

use crate::lock;

/// The size of the first extent. Each later extent is twice as large, so that few descriptors serve any size. An
/// extent is only address space: pages are allocated when first written.
const FIRST_EXTENT_BYTES: usize = 64 * 1024 * 1024;
/// Pieces are whole pages, so that a freed piece can return its pages.
const PAGE_BYTES: usize = 4096;

/// Allocates pieces from its extents. Clones share the extents.
#[derive(Clone, Default)]
pub(crate) struct Arena(Arc<Mutex<Space>>);

#[derive(Default)]
struct Space {
    extents: Vec<Arc<Extent>>,
    /// The unused end of the last extent.
    rest: Option<Region>,
    /// Free pieces by length.
    free: HashMap<usize, Vec<(Arc<Extent>, Region)>>,
    /// Addresses of all pieces cut so far.
    cut: Vec<Range<usize>>,
    /// Number of living [`GradientMemory`] values. While any of them lives, pieces keep their pages.
    users: usize,
}

/// A memfd with its mapping. Both are closed with the last piece and the arena.
pub(crate) struct Extent {
    /// Number of the extent, unique in this process.
    pub(crate) id: u64,
    file: SharedFile,
    _map: Mapping,
}

/// Keeps the memory of a rank's gradients in place, for a device that copies gradients there itself.
///
/// While it lives, all pieces keep their addresses and pages. The pages of idle pieces count in no budget. A device may
/// page-lock the pieces. If a page were returned and taken again, the device would write the old page, and servers read
/// the new one.
pub struct GradientMemory(Arena);

/// Exclusive bytes of this process. No other process writes them: servers of the same user map them read-only.
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
    /// Takes a piece of `bytes`. Its contents are zero, or those of its last use.
    pub(crate) fn take(&self, bytes: usize) -> io::Result<Piece> {
        let length = bytes.next_multiple_of(PAGE_BYTES);
        let mut space = lock(&self.0);
        let (extent, region) = match space.free.get_mut(&length).and_then(Vec::pop) {
            Some(found) => found,
            None => {
                let (extent, region) = space.cut(length)?;
                let start = region.bytes().as_ptr().addr();
                space.cut.push(start..start + length);
                (extent, region)
            }
        };
        drop(space);
        region.populate();
        Ok(Piece { extent, region: Some(region), bytes, arena: self.clone() })
    }

    /// Keeps the pages of all pieces while the returned value lives.
    pub(crate) fn kept(&self) -> GradientMemory {
        lock(&self.0).users += 1;
        GradientMemory(self.clone())
    }
}

impl GradientMemory {
    /// Addresses of the pieces, whole pages each, without the first `known` pieces. A reused piece is not listed
    /// again.
    pub fn pieces(&self, known: usize) -> Vec<Range<usize>> {
        lock(&self.0.0).cut.iter().skip(known).cloned().collect()
    }
}

impl Drop for GradientMemory {
    fn drop(&mut self) {
        lock(&self.0.0).users -= 1;
    }
}

impl Space {
    /// Cuts a new piece. A new extent is made if the last one has too little left.
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
    /// The piece's extent, and its offset there.
    pub(crate) fn place(&self) -> (Arc<Extent>, u64) {
        (Arc::clone(&self.extent), self.region.as_ref().map_or(0, |region| region.offset() as u64))
    }

    /// Leaves the bytes as they are, for other processes, until no process maps the extent.
    pub(crate) fn abandon(mut self) {
        self.region = None;
    }
}

impl AsRef<[u8]> for Piece {
    fn as_ref(&self) -> &[u8] {
        self.region.as_ref().map_or(&[], |region| &region.bytes()[..self.bytes])
    }
}

/// Writing is allowed while a server still reads an older gradient here. The checksum no longer matches, so the server
/// refuses the bytes.
impl AsMut<[u8]> for Piece {
    fn as_mut(&mut self) -> &mut [u8] {
        self.region.as_mut().map_or(&mut [], |region| &mut region.bytes_mut()[..self.bytes])
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        let Some(mut region) = self.region.take() else { return };
        // The lock keeps other threads from page-locking pages that are being returned.
        let mut space = lock(&self.arena.0);
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
