//! The read window: parts of images and of frozen weights that pulls read from the drives. Some are read
//! before a pull asks for them.
//!
//! A pull gives the order of its slices. So the next parts are read while one is sent, and a pull reaches the
//! speed of a drive with several requests. With one request at a time, each would take a drive's latency.
//! Ranks that pull the same weights at about the same time share each read.

mod places;

use std::{
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use longshore_proto::{Fault, limits::CHUNK_BYTES};

use self::places::{Found, Places};
pub(super) use self::places::{Kept, PartOf};
use crate::{
    lock,
    memory::{AllocationError, Region, Slab},
};

/// Length of a part: a chunk, the most that a pull sends at once. The last part of a shard may be shorter.
/// Parts are whole blocks, since a block has one checksum.
pub(super) const PART_BYTES: usize = CHUNK_BYTES;
/// Most parts in memory. A rank has two pulls under way, and each is near its best with four reads ahead. The
/// other four are being sent, or are there for another rank.
const PARTS: usize = 12;
/// Interval at which a waiting reader checks that the store has not failed.
const LOOK: Duration = Duration::from_millis(200);

pub(super) struct ReadWindow {
    inner: Mutex<Inner>,
    changed: Condvar,
}

struct Inner {
    places: Places,
    /// By place. None while a drive fills it.
    buffers: Vec<Option<Arc<Buffer>>>,
}

pub(super) struct Buffer {
    region: Region,
    /// True once its blocks were compared with their checksums.
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
    /// For [`ReadWindow::arrived`].
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

    /// The bytes of all buffers.
    pub(super) fn bytes(parts: usize) -> usize {
        parts.min(PARTS) * PART_BYTES
    }

    /// Waits for a part. `fetch` begins a read, if there must be one. `failure` returns the fault that makes
    /// the wait hopeless.
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
            if !inner.places.is_reading(place) {
                taken.buffer = inner.buffers[place].clone();
                drop(inner);
                // A failed read has failed the store.
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

    /// A read has ended.
    pub(super) fn arrived(&self, place: usize, buffer: Region, whole: bool) {
        let mut inner = lock(&self.inner);
        inner.buffers[place] = Some(Buffer::holding(buffer));
        inner.places.arrived(place, whole);
        drop(inner);
        self.changed.notify_all();
    }

    /// Makes all current parts unfindable.
    pub(super) fn forget(&self) {
        lock(&self.inner).places.forget();
    }
}

impl Inner {
    /// Returns the memory of an evicted place.
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
        // The next user of the place needs the last reference.
        self.buffer = None;
        inner.places.release(self.place);
        drop(inner);
        self.window.changed.notify_all();
    }
}
