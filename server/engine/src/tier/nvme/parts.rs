//! The read window: parts of images and of frozen weights that pulls read from the drives, some ahead of the pull.
//!
//! A pull gives the order of its slices, so the next parts are read while a part is sent. Single requests would take a
//! drive's latency for each part. Ranks that pull the same weights at about the same time share each read.

use std::{
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use longshore_proto::{Fault, Version, limits::CHUNK_BYTES};

use crate::{
    ids::OwnedShard,
    lock,
    memory::{AllocationError, Region, Slab},
};

/// Length of a part: a chunk, the most that a pull sends at once. The last part of a shard may be shorter.
/// Parts are whole blocks, since a block has one checksum.
pub(super) const PART_BYTES: usize = CHUNK_BYTES;
/// Largest number of parts in memory. A rank has two pulls at once, each near its best with four reads ahead. The other
/// four parts are being sent, or wait for another rank.
const PARTS: usize = 12;
/// Interval at which a waiting reader checks that the store has not failed.
const LOOK: Duration = Duration::from_millis(200);
/// Number of requests for each place after which an unused prefetch is given up. By then its pull has ended, or the
/// version is gone.
const PATIENCE: u64 = 4;

/// Data of a shard that pulls read from a drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kept {
    Image { version: Version, slot: u8 },
    Frozen,
}

/// A part of a shard's stored data, counted from its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PartOf {
    pub(super) owned: OwnedShard,
    pub(super) kept: Kept,
    pub(super) part: usize,
}

pub(super) struct ReadWindow {
    inner: Mutex<Inner>,
    changed: Condvar,
}

struct Inner {
    places: Places,
    /// Buffers by place. None while a drive fills the buffer.
    buffers: Vec<Option<Arc<Buffer>>>,
}

pub(super) struct Buffer {
    region: Region,
    /// True once the part's blocks were compared with their checksums.
    checked: AtomicBool,
}

/// A part in memory, for a reader that uses it. The part is not evicted meanwhile.
pub(super) struct InUse<'a> {
    window: &'a ReadWindow,
    place: usize,
    buffer: Option<Arc<Buffer>>,
}

/// A read to be made, and its target.
pub(super) struct Fetch {
    pub(super) part: PartOf,
    pub(super) buffer: Region,
    /// Place of the part, for [`ReadWindow::arrived`].
    pub(super) place: usize,
}

impl ReadWindow {
    /// `parts` is the number of parts that exist.
    pub(super) fn allocate(parts: usize) -> Result<ReadWindow, AllocationError> {
        let count = parts.min(PARTS);
        let regions = Slab::allocate(ReadWindow::bytes(parts))?.carve_here(&vec![PART_BYTES; count]);
        let buffers = regions.into_iter().map(|region| Some(Buffer::holding(region))).collect();
        let inner = Mutex::new(Inner { places: Places::new(count), buffers });
        Ok(ReadWindow { inner, changed: Condvar::new() })
    }

    pub(super) fn bytes(parts: usize) -> usize {
        parts.min(PARTS) * PART_BYTES
    }

    /// Waits for a part. `fetch` begins a read, if needed. `failure` returns the fault that makes the wait hopeless.
    pub(super) fn take(
        &self,
        part: PartOf,
        fetch: impl FnOnce(Fetch),
        failure: impl Fn() -> Option<Fault>,
    ) -> Result<InUse<'_>, Fault> {
        let place = loop {
            let mut inner = lock(&self.inner);
            match inner.places.want(part) {
                Found::Here(place) => break place,
                Found::Read(place) => {
                    let buffer = inner.give_way(place);
                    drop(inner);
                    fetch(Fetch { part, buffer, place });
                    break place;
                }
                Found::Full => {
                    let waited = self.changed.wait_timeout(inner, LOOK);
                    drop(waited.unwrap_or_else(PoisonError::into_inner));
                    failure().map_or(Ok(()), Err)?;
                }
            }
        };
        let mut taken = InUse { window: self, place, buffer: None };
        loop {
            let inner = lock(&self.inner);
            if !inner.places.places[place].reading {
                taken.buffer = inner.buffers[place].clone();
                drop(inner);
                // A failed read has failed the store, which `failure` tells.
                failure().map_or(Ok(()), Err)?;
                return Ok(taken);
            }
            drop(self.changed.wait_timeout(inner, LOOK).unwrap_or_else(PoisonError::into_inner));
            failure().map_or(Ok(()), Err)?;
        }
    }

    /// Returns the read that prefetches a part. None if the part is here, or if there is no room.
    pub(super) fn ahead(&self, part: PartOf) -> Option<Fetch> {
        let mut inner = lock(&self.inner);
        let place = inner.places.ahead(part)?;
        let buffer = inner.give_way(place);
        Some(Fetch { part, buffer, place })
    }

    pub(super) fn arrived(&self, place: usize, buffer: Region, whole: bool) {
        let mut inner = lock(&self.inner);
        inner.buffers[place] = Some(Buffer::holding(buffer));
        inner.places.arrived(place, whole);
        drop(inner);
        self.changed.notify_all();
    }

    pub(super) fn forget(&self) {
        lock(&self.inner).places.forget();
    }
}

impl Inner {
    fn give_way(&mut self, place: usize) -> Region {
        let buffer = self.buffers[place].take().and_then(Arc::into_inner);
        buffer.expect("a place without users, which no drive fills, has the only reference").region
    }
}

impl Buffer {
    fn holding(region: Region) -> Arc<Buffer> {
        Arc::new(Buffer { region, checked: AtomicBool::new(false) })
    }
}

impl InUse<'_> {
    pub(super) fn bytes(&self) -> &[u8] {
        self.buffer.as_ref().map_or(&[], |buffer| buffer.region.bytes())
    }

    pub(super) fn is_checked(&self) -> bool {
        self.buffer.as_ref().is_some_and(|buffer| buffer.checked.load(Ordering::Acquire))
    }

    pub(super) fn checked(&self) {
        if let Some(buffer) = &self.buffer {
            buffer.checked.store(true, Ordering::Release);
        }
    }
}

impl Drop for InUse<'_> {
    fn drop(&mut self) {
        let mut inner = lock(&self.window.inner);
        // The reference is dropped before the place is released, since the next user of the place needs the only one.
        self.buffer = None;
        inner.places.release(self.place);
        drop(inner);
        self.window.changed.notify_all();
    }
}

/// Place of a part, for a reader that wants it. The reader is a user of that place until [`Places::release`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    /// The part is in this place, or on its way there.
    Here(usize),
    /// The reader must read the part into this place, whose old part is evicted.
    Read(usize),
    /// All places are in use, and one of them will be released.
    Full,
}

struct Places {
    places: Vec<Place>,
    /// Number of requests for parts so far.
    clock: u64,
}

#[derive(Clone, Default)]
struct Place {
    /// The part that a reader may find here, if any.
    holds: Option<PartOf>,
    reading: bool,
    /// Number of readers. A place with users is not evicted.
    users: usize,
    /// True if the part was read ahead, and has yet to be pulled.
    expected: bool,
    /// Time of the last request or prefetch, by the clock.
    used: u64,
}

impl Places {
    fn new(count: usize) -> Places {
        Places { places: vec![Place::default(); count], clock: 0 }
    }

    fn find(&self, part: PartOf) -> Option<usize> {
        self.places.iter().position(|place| place.holds == Some(part))
    }

    fn is_free(place: &Place) -> bool {
        place.users == 0 && !place.reading
    }

    /// Returns the place to evict: an empty one, or the one whose part was requested longest ago.
    fn idle(&self) -> Option<usize> {
        let overdue = self.clock.saturating_sub(PATIENCE * self.places.len() as u64);
        let idle = |place: &Place| Places::is_free(place) && (!place.expected || place.used < overdue);
        let places = self.places.iter().enumerate().filter(|(_, place)| idle(place));
        places.min_by_key(|(_, place)| place.holds.map(|_| place.used)).map(|(index, _)| index)
    }

    /// Finds a part, or a place for it. If all parts are still expected, the latest prefetch is evicted.
    fn want(&mut self, part: PartOf) -> Found {
        self.clock += 1;
        let found = self.find(part);
        let free = || self.places.iter().enumerate().filter(|(_, place)| Places::is_free(place));
        let last = || free().max_by_key(|(_, place)| place.used).map(|(index, _)| index);
        let Some(index) = found.or_else(|| self.idle()).or_else(last) else { return Found::Full };
        let place = &mut self.places[index];
        (place.expected, place.used) = (false, self.clock);
        place.users += 1;
        if found.is_some() {
            return Found::Here(index);
        }
        (place.holds, place.reading) = (Some(part), true);
        Found::Read(index)
    }

    /// Returns the place to prefetch a part into. None if the part is here already, or no place can be
    /// evicted.
    fn ahead(&mut self, part: PartOf) -> Option<usize> {
        if self.find(part).is_some() {
            return None;
        }
        let index = self.idle()?;
        self.places[index] =
            Place { holds: Some(part), reading: true, users: 0, expected: true, used: self.clock };
        Some(index)
    }

    /// Ends a read. A part that was not read whole cannot be found.
    fn arrived(&mut self, index: usize, whole: bool) {
        let place = &mut self.places[index];
        place.reading = false;
        place.holds = place.holds.filter(|_| whole);
    }

    fn release(&mut self, index: usize) {
        self.places[index].users -= 1;
    }

    fn forget(&mut self) {
        self.places.iter_mut().for_each(|place| place.holds = None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(part: usize) -> PartOf {
        PartOf { owned: OwnedShard(0), kept: Kept::Frozen, part }
    }

    /// Reads a part as a pull does. Returns true if it was there.
    fn pull(places: &mut Places, wanted: usize) -> bool {
        let found = places.want(part(wanted));
        match found {
            Found::Here(index) => {
                places.arrived(index, true);
                places.release(index);
                true
            }
            Found::Read(index) => {
                places.arrived(index, true);
                places.release(index);
                false
            }
            Found::Full => panic!("nobody uses any"),
        }
    }

    #[test]
    fn a_pull_in_order_finds_all_but_the_first() {
        for down in [false, true] {
            let mut places = Places::new(6);
            let order = |step: usize| if down { 1000 - step } else { step };
            let mut missed = 0;
            for step in 0..100 {
                for next in step + 1..step + 5 {
                    if let Some(index) = places.ahead(part(order(next))) {
                        places.arrived(index, true);
                    }
                }
                missed += usize::from(!pull(&mut places, order(step)));
            }
            assert_eq!(missed, 1);
        }
    }

    #[test]
    fn what_nobody_came_for_gives_way_after_a_while() {
        let room = |pulls: usize| {
            let mut places = Places::new(4);
            for left in 0..4 {
                let index = places.ahead(part(100 + left)).unwrap();
                places.arrived(index, true);
            }
            for _ in 0..pulls {
                pull(&mut places, 0);
            }
            (1..9).filter(|&next| places.ahead(part(next)).is_some()).count()
        };
        // A pull takes a place from an expected part. After four times four pulls no part is waited for.
        assert_eq!([0, 1, 16, 17].map(room), [0, 1, 1, 4]);
    }
}
