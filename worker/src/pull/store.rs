//! Host memory of one feed, in segments of at most a chunk. A single fetch writes a segment, which is readable
//! once it is whole.

use std::{
    io,
    ops::Range,
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{
            AtomicBool,
            Ordering::{Acquire, Release},
        },
    },
};

use longshore_memory::{Foreign, Source};
use longshore_proto::{Dtype, Fault, Layout, ShardId, Slice, Version, checksum::Crc32, limits};
use longshore_wire::sink::Read;

use crate::{
    device::{BufferPool, PooledBuffer},
    error::Shortage,
};

/// The most bytes per read: their checksum is taken while they are in the core's L2 cache.
const READ_BYTES: usize = 256 * 1024;

/// A run of flat elements inside one shard.
pub(super) struct Segment {
    pub(super) range: Range<u64>,
    pub(super) shard: ShardId,
    whole: AtomicBool,
    filling: RwLock<Filling>,
}

struct Filling {
    body: Body,
    /// Number of bytes received so far, from the start.
    filled: usize,
}

enum Body {
    Buffer(PooledBuffer),
    /// No memory yet. The weights will be found in shared memory; if a server sends them after all, a buffer is taken.
    Expected,
    InPlace(View),
    /// The feed is gone. A fetch that still runs must not keep memory from the next feed.
    Gone,
}

/// Weights in a server's own memory.
#[derive(Clone)]
pub(super) struct View {
    pub(super) images: Arc<Foreign>,
    /// Offset of the first byte, and offset of the version stamp, which holds 1 + the version.
    pub(super) at: u64,
    pub(super) stamp: u64,
    pub(super) version: Version,
}

impl View {
    /// Returns true until the server begins to write the version after next to the same place.
    pub(super) fn is_current(&self) -> bool {
        self.images.stamp(self.stamp) == self.version.0 + 1
    }
}

/// The weights were overwritten before or during the read.
pub(super) struct Overwritten;

impl Segment {
    pub(super) fn is_whole(&self) -> bool {
        self.whole.load(Acquire)
    }

    /// Returns the flat elements that have not arrived.
    pub(super) fn missing(&self, dtype: Dtype) -> Range<u64> {
        let filled = self.filling.read().unwrap_or_else(PoisonError::into_inner).filled as u64;
        self.range.start + filled / dtype.bytes()..self.range.end
    }

    /// Returns true if elements from `at` continue the received elements.
    fn continues(&self, at: u64, dtype: Dtype) -> bool {
        self.missing(dtype).start == at && !self.is_whole()
    }

    /// Writes bytes after the received bytes, and updates their checksum. [`Segment::commit`] makes them count.
    fn put(&self, start: usize, payload: &[u8], sum: &mut Crc32) {
        let mut filling = self.filling.write().unwrap_or_else(PoisonError::into_inner);
        // The feed is gone: later bytes are discarded.
        let Body::Buffer(buffer) = &mut filling.body else { return };
        sum.copy(payload, &mut buffer.as_mut()[start..start + payload.len()]);
    }

    /// Puts bytes as [`Segment::put`] does, by one call of `read`, which writes them in place.
    fn read_from(
        &self,
        start: usize,
        most: usize,
        sum: &mut Crc32,
        read: &mut Read<'_>,
    ) -> io::Result<usize> {
        let mut filling = self.filling.write().unwrap_or_else(PoisonError::into_inner);
        let Body::Buffer(buffer) = &mut filling.body else {
            drop(filling);
            return read(&mut [0; 4096][..most.min(4096)]);
        };
        let place = &mut buffer.as_mut()[start..start + most];
        let count = read(place)?;
        sum.update(&place[..count]);
        Ok(count)
    }

    /// Makes the bytes up to `end` count as received.
    fn commit(&self, end: usize) {
        let mut filling = self.filling.write().unwrap_or_else(PoisonError::into_inner);
        filling.filled = end;
        let whole = matches!(&filling.body, Body::Buffer(buffer) if buffer.as_ref().len() == end);
        self.whole.store(whole, Release);
    }

    /// Takes a buffer for a payload, if weights in shared memory were expected.
    fn expect_payload(&self, pool: &BufferPool, dtype: Dtype) -> Result<(), Shortage> {
        let mut filling = self.filling.write().unwrap_or_else(PoisonError::into_inner);
        if matches!(filling.body, Body::Expected) {
            filling.body =
                Body::Buffer(pool.take(((self.range.end - self.range.start) * dtype.bytes()) as usize)?);
        }
        Ok(())
    }

    /// Notes that the whole segment lies at `view`.
    fn find(&self, view: View) {
        let mut filling = self.filling.write().unwrap_or_else(PoisonError::into_inner);
        if !matches!(filling.body, Body::Gone) {
            filling.body = Body::InPlace(view);
            self.whole.store(true, Release);
        }
    }

    /// Returns the address of some bytes of a whole segment in a server's memory; None if they lie elsewhere. A
    /// reader of that address calls [`Segment::read`] afterwards, to learn whether the bytes were still valid.
    pub(super) fn address(&self, within: Range<usize>) -> Option<usize> {
        let filling = self.filling.read().unwrap_or_else(PoisonError::into_inner);
        let Body::InPlace(view) = &filling.body else { return None };
        Some(view.images.address(view.at + within.start as u64, within.len() as u64))
    }

    /// Passes some bytes of a whole segment to `read`. The results of `read` are void unless this succeeds.
    pub(super) fn read(
        &self,
        within: Range<usize>,
        read: impl FnOnce(Source<'_, u8>),
    ) -> Result<(), Overwritten> {
        let filling = self.filling.read().unwrap_or_else(PoisonError::into_inner);
        match &filling.body {
            Body::Buffer(buffer) => read(buffer.as_ref()[within].into()),
            Body::InPlace(view) => {
                if !view.is_current() {
                    return Err(Overwritten);
                }
                read(view.images.source(view.at + within.start as u64, within.len() as u64));
                if !view.is_current() {
                    return Err(Overwritten);
                }
            }
            // Unreachable: a reader holds the feed, and waited until the segment was whole.
            Body::Expected | Body::Gone => return Err(Overwritten),
        }
        Ok(())
    }
}

/// All segments of a feed, in flat order.
pub(super) struct Store {
    pub(super) dtype: Dtype,
    pub(super) segments: Vec<Segment>,
    /// True if all segments will be found in their servers' memory.
    pub(super) is_lent: bool,
    pool: BufferPool,
}

/// Cuts the requested flat ranges at shards, in order. Returns each slice with its flat range.
pub(super) fn cut(layout: &Layout, order: &[Range<u64>]) -> Result<Vec<(Slice, Range<u64>)>, Fault> {
    let mut pieces = Vec::new();
    for (index, range) in order.iter().enumerate() {
        if range.start >= range.end || range.end > layout.elements() {
            let field = format!("pull.order[{index}]");
            let limit = format!("a non-empty range inside 0..{}", layout.elements());
            return Err(Fault::invalid(field, format!("{range:?}"), limit, "take ranges from the layout"));
        }
        let mut start = range.start;
        for slice in layout.slices(range.clone()) {
            pieces.push((slice, start..start + slice.elements));
            start += slice.elements;
        }
    }
    let mut sorted: Vec<&Range<u64>> = pieces.iter().map(|(_, range)| range).collect();
    sorted.sort_by_key(|range| range.start);
    if let Some(pair) = sorted.windows(2).find(|pair| pair[0].end > pair[1].start) {
        let value = format!("{:?} and {:?}", pair[0], pair[1]);
        return Err(Fault::invalid(
            "pull.order",
            value,
            "ranges that do not overlap",
            "pull each element once",
        ));
    }
    Ok(pieces)
}

impl Store {
    /// `in_place` returns true for a shard whose weights are read in its server's memory, and take none here.
    pub(super) fn new(
        dtype: Dtype,
        pieces: &[(Slice, Range<u64>)],
        pool: &BufferPool,
        in_place: impl Fn(ShardId) -> bool,
    ) -> Result<Store, Shortage> {
        let step = limits::CHUNK_BYTES as u64 / dtype.bytes();
        let mut segments = Vec::new();
        for (slice, range) in pieces {
            let mut start = range.start;
            while start < range.end {
                let end = range.end.min(start + step);
                let segment = Segment {
                    range: start..end,
                    shard: slice.shard,
                    whole: AtomicBool::new(false),
                    filling: RwLock::new(Filling { body: Body::Expected, filled: 0 }),
                };
                if !in_place(slice.shard) {
                    segment.expect_payload(pool, dtype)?;
                }
                segments.push(segment);
                start = end;
            }
        }
        segments.sort_by_key(|segment| segment.range.start);
        let is_lent = pieces.iter().all(|(slice, _)| in_place(slice.shard));
        Ok(Store { dtype, segments, is_lent, pool: pool.clone() })
    }

    /// Frees all memory.
    pub(super) fn empty(&self) {
        for segment in &self.segments {
            segment.filling.write().unwrap_or_else(PoisonError::into_inner).body = Body::Gone;
        }
    }

    /// Returns the segments that hold a flat range; None if a part of it is not in this feed.
    pub(super) fn covering(&self, range: &Range<u64>) -> Option<&[Segment]> {
        self.span(range).map(|span| &self.segments[span])
    }

    fn span(&self, range: &Range<u64>) -> Option<Range<usize>> {
        let first = self.segments.partition_point(|segment| segment.range.end <= range.start);
        let mut at = range.start;
        let mut last = first;
        while at < range.end {
            let segment = self.segments.get(last).filter(|segment| segment.range.start <= at)?;
            at = segment.range.end;
            last += 1;
        }
        Some(first..last)
    }

    /// Returns the place of `elements` flat elements from `at`. None if they were not requested, or are not next.
    pub(super) fn place(&self, at: u64, elements: u64) -> Result<Option<Cursor>, Shortage> {
        let Some(range) = self.next(at, elements) else { return Ok(None) };
        let segments = &self.segments[range.clone()];
        for segment in segments {
            segment.expect_payload(&self.pool, self.dtype)?;
        }
        let start = segments.first().map_or(0, |segment| (at - segment.range.start) * self.dtype.bytes());
        Ok(Some(Cursor { first: range.start, index: range.start, end: range.end, at: start as usize }))
    }

    /// Writes the next bytes of a payload. The bytes are not readable yet.
    pub(super) fn put(&self, place: &mut Cursor, mut payload: &[u8], sum: &mut Crc32) {
        while let Some((segment, room)) = self.segment(place).filter(|_| !payload.is_empty()) {
            let (now, later) = payload.split_at(payload.len().min(room));
            segment.put(place.at, now, sum);
            place.at += now.len();
            payload = later;
        }
    }

    /// Reads the next bytes of a payload into place, at most `most`, with one call of `read`.
    pub(super) fn read_from(
        &self,
        place: &mut Cursor,
        most: usize,
        sum: &mut Crc32,
        read: &mut Read<'_>,
    ) -> io::Result<usize> {
        let Some((segment, room)) = self.segment(place) else { return Ok(0) };
        let count = segment.read_from(place.at, most.min(room).min(READ_BYTES), sum, read)?;
        place.at += count;
        Ok(count)
    }

    /// Returns the segment of the next byte, and the bytes left in it.
    fn segment(&self, place: &mut Cursor) -> Option<(&Segment, usize)> {
        while place.index < place.end {
            let segment = &self.segments[place.index];
            let bytes = self.bytes(segment);
            if place.at < bytes {
                return Some((segment, bytes - place.at));
            }
            (place.index, place.at) = (place.index + 1, 0);
        }
        None
    }

    /// Makes all written bytes count as received.
    pub(super) fn commit(&self, place: Cursor) {
        for segment in &self.segments[place.first..place.index] {
            segment.commit(self.bytes(segment));
        }
        if place.index < place.end {
            self.segments[place.index].commit(place.at);
        }
    }

    fn bytes(&self, segment: &Segment) -> usize {
        ((segment.range.end - segment.range.start) * self.dtype.bytes()) as usize
    }

    /// Notes that `elements` flat elements from `at` lie at `view`. Returns false if they were not requested, are
    /// not next, or do not end with a segment.
    pub(super) fn find(&self, at: u64, elements: u64, view: &View) -> bool {
        let Some(range) = self.next(at, elements) else { return false };
        let segments = &self.segments[range];
        let (Some(first), Some(last)) = (segments.first(), segments.last()) else { return false };
        // A segment that was begun by a payload is found from its start on.
        let begun = (at - first.range.start) * self.dtype.bytes();
        let Some(start) = view.at.checked_sub(begun).filter(|_| last.range.end == at + elements) else {
            return false;
        };
        for segment in segments {
            let offset = (segment.range.start - first.range.start) * self.dtype.bytes();
            segment.find(View { at: start + offset, ..view.clone() });
        }
        true
    }

    /// Returns the segments of `elements` flat elements from `at`, if the elements come next in each segment.
    fn next(&self, at: u64, elements: u64) -> Option<Range<usize>> {
        let range = self.span(&(at..at.checked_add(elements)?))?;
        let segments = &self.segments[range.clone()];
        let follows = |(index, segment): (usize, &Segment)| {
            segment.continues(if index == 0 { at } else { segment.range.start }, self.dtype)
        };
        segments.iter().enumerate().all(follows).then_some(range)
    }
}

/// The place of a message's payload, over one or more segments of a store.
pub(super) struct Cursor {
    first: usize,
    end: usize,
    /// The segment being written, and the offset of the next byte in it.
    index: usize,
    at: usize,
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init)] // an order of one range is meant
mod tests {
    use longshore_proto::{Param, Partition, limits::BLOCK_ELEMENTS};

    use super::*;
    use crate::device::Budget;

    fn layout(blocks: u64) -> Layout {
        let param = Param { name: "p".into(), shape: vec![blocks * BLOCK_ELEMENTS], group: 0 };
        Layout::new(&[param], 1, 2 * BLOCK_ELEMENTS, &[Partition::whole(1)]).unwrap()
    }

    fn store(dtype: Dtype, order: &[Range<u64>]) -> Store {
        let pieces = cut(&layout(20), order).unwrap();
        Store::new(dtype, &pieces, &BufferPool::new(Budget::unlimited("test"), "test"), |_| false).unwrap()
    }

    fn all_of(segment: &Segment, mut read: impl FnMut(&[u8])) {
        let bytes = (segment.range.end - segment.range.start) * 4;
        assert!(segment.read(0..bytes as usize, |bytes| bytes.pieces(|_, piece| read(piece))).is_ok());
    }

    /// Writes as a fetch does, in pieces that do not end with elements.
    fn write(store: &Store, at: u64, payload: &[u8]) -> bool {
        let Some(mut place) = store.place(at, payload.len() as u64 / store.dtype.bytes()).unwrap() else {
            return false;
        };
        let mut sum = Crc32::new();
        payload.chunks(100_003).for_each(|slice| store.put(&mut place, slice, &mut sum));
        assert_eq!(sum.value(), longshore_proto::checksum::crc32(payload));
        store.commit(place);
        true
    }

    #[test]
    fn a_range_is_readable_once_all_of_it_came_in_any_cut() {
        let store = store(Dtype::F32, std::slice::from_ref(&(100..700_000)));
        let values: Vec<u8> = (0..699_900u32).flat_map(|index| index.to_le_bytes()).collect();
        let mut at = 0;
        for cut in [4usize, 1_000_000, 1_048_576, 400_000].into_iter().cycle() {
            let end = (at + cut).min(values.len());
            assert!(write(&store, 100 + at as u64 / 4, &values[at..end]));
            at = end;
            if at == values.len() {
                break;
            }
        }
        assert!(store.segments.iter().all(Segment::is_whole));
        let mut read: Vec<u8> = Vec::new();
        store
            .covering(&(100..700_000))
            .unwrap()
            .iter()
            .for_each(|segment| all_of(segment, |bytes| read.extend(bytes)));
        assert!(read == values);
    }

    #[test]
    fn what_was_not_asked_for_or_comes_twice_is_refused() {
        let store = store(Dtype::Bf16, &[0..64, 128..256]);
        assert!(write(&store, 0, &[1; 64]));
        assert!(!write(&store, 0, &[1; 64]), "twice");
        assert!(!write(&store, 48, &[1; 16]), "a gap");
        assert!(!write(&store, 64, &[1; 2]), "not asked for");
        assert_eq!(store.segments[0].missing(Dtype::Bf16), 32..64);
        assert!(store.covering(&(0..128)).is_none() && store.covering(&(130..200)).is_some());
    }

    #[test]
    fn what_is_not_committed_was_never_there() {
        let store = store(Dtype::F32, std::slice::from_ref(&(0..64)));
        let mut place = store.place(0, 64).unwrap().unwrap();
        store.put(&mut place, &[1; 256], &mut Crc32::new());
        assert!(!store.segments[0].is_whole());
        assert_eq!(store.segments[0].missing(Dtype::F32), 0..64);
        assert!(write(&store, 0, &[2; 256]));
        all_of(&store.segments[0], |bytes| assert_eq!(bytes, [2; 256]));
    }

    #[test]
    fn bad_orders_are_refused() {
        let layout = layout(1);
        for order in [&[(0, 0)][..], &[(0, BLOCK_ELEMENTS + 1)], &[(0, 10), (9, 20)]] {
            let order: Vec<Range<u64>> = order.iter().map(|&(start, end)| start..end).collect();
            assert!(cut(&layout, &order).is_err(), "{order:?}");
        }
    }
}
