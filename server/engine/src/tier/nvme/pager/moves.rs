//! Reads ahead and writes behind, which move a shard between its buffer and its drive.

use std::{
    mem,
    sync::{Arc, atomic::Ordering},
    time::Instant,
};

use longshore_proto::Fault;

use super::{Entry, Held, Holding, PagerState, ShardPager};
use crate::{
    ids::{OwnedShard, OwnedShards},
    io::{Direction, Part, Request},
    memory::Region,
    tier::fault::{internal, io},
};

impl ShardPager {
    /// Returns a free buffer. None while no buffer is free; a change will announce one.
    pub(super) fn buffer(
        self: &Arc<Self>,
        state: &mut PagerState,
        wanted: OwnedShard,
    ) -> Result<Option<Region>, Fault> {
        if let Some(region) = state.free.pop() {
            return Ok(Some(region));
        }
        if state.writing > 0 {
            return Ok(None);
        }
        // All buffers hold prefetched shards: the shard needed last is evicted. Before the start buffers hold
        // loaded shards: the least recently used one is evicted, once it is written.
        let count = state.entries.len();
        let distance = |owned: OwnedShard| (owned.index() + count - state.next.index()) % count;
        let ready = |owned: &OwnedShard| {
            let entry = &state.entries[owned.index()];
            *owned != wanted && !self.resident[owned.index()] && matches!(entry.holding, Holding::Ready(_))
        };
        let dirty = |owned: &OwnedShard| {
            let holding = &state.entries[owned.index()].holding;
            matches!(holding, Holding::Ready(held) if held.dirty)
        };
        let clean = OwnedShards::all(count)
            .filter(ready)
            .filter(|owned| !dirty(owned))
            .max_by_key(|&owned| distance(owned));
        if let Some(owned) = clean {
            let held = mem::replace(&mut state.entries[owned.index()].holding, Holding::Disk);
            return Ok(if let Holding::Ready(held) = held { Some(held.region) } else { None });
        }
        let oldest =
            OwnedShards::all(count).filter(ready).min_by_key(|&owned| state.entries[owned.index()].used);
        if let Some(owned) = oldest {
            self.write_dirty(state, owned);
        }
        Ok(None)
    }

    /// Starts reading a shard.
    pub(super) fn read(self: &Arc<Self>, state: &mut PagerState, owned: OwnedShard, buffer: Region) {
        let entry = &mut state.entries[owned.index()];
        entry.holding = Holding::Reading;
        let parts = vec![self.plan.state_part(owned, entry.slot)];
        let pager = Arc::clone(self);
        let file = self.plan.shards[owned.index()].file;
        state.debts.asked(file, Instant::now());
        let done = Box::new(move |region: Region, result: std::io::Result<()>| {
            let mut state = pager.lock();
            state.debts.answered(file, Instant::now());
            match result {
                Ok(()) => {
                    let held = Held { region, checked: false, dirty: false };
                    state.entries[owned.index()].holding = Holding::Ready(held);
                }
                Err(error) => {
                    let fault = pager.io_fault(owned, "read", error);
                    state.failed.get_or_insert(fault);
                }
            }
            drop(state);
            pager.changed.notify_all();
        });
        let disk = &self.disks[file];
        disk.submit(Request { direction: Direction::Read, parts, buffer, done });
    }

    /// Prefetches the next shards in forward order, as far as there are buffers. No update needs a frozen
    /// one.
    pub(super) fn read_ahead(self: &Arc<Self>, state: &mut PagerState) {
        let count = state.entries.len();
        let order = (0..count)
            .map(|step| OwnedShard((state.next.index() + step) % count))
            .filter(|&owned| !self.resident[owned.index()] && !self.plan.shards[owned.index()].frozen);
        let ahead: Vec<OwnedShard> = order.take(self.buffers).collect();
        for owned in ahead {
            let entry = &state.entries[owned.index()];
            if entry.blank || !matches!(entry.holding, Holding::Disk) {
                continue;
            }
            let Some(region) = state.free.pop() else { return };
            self.read(state, owned, region);
        }
    }

    /// Writes an updated shard in the background, and prefetches the next.
    pub(in crate::tier::nvme) fn write(self: &Arc<Self>, owned: OwnedShard, held: Held) {
        let mut state = self.lock();
        state.next = OwnedShard(owned.next().index() % state.entries.len());
        let target = state.slots.updated();
        let mut parts = vec![self.plan.state_part(owned, target.state)];
        if self.plan.shards[owned.index()].image_bytes > 0 {
            parts.push(self.plan.image_part(owned, target.image));
        }
        self.submit_write(&mut state, owned, target.state, parts, held.region);
        self.read_ahead(&mut state);
        drop(state);
        self.changed.notify_all();
    }

    /// Starts writing a loaded shard to the slot that it is read from.
    fn write_dirty(self: &Arc<Self>, state: &mut PagerState, owned: OwnedShard) {
        let holding = mem::replace(&mut state.entries[owned.index()].holding, Holding::Writing);
        let Holding::Ready(held) = holding else {
            state.entries[owned.index()].holding = holding;
            return;
        };
        let bytes = &held.region.bytes()[..self.plan.shards[owned.index()].state_bytes];
        for (block, checksum) in self.checksums[owned.index()].state.iter().enumerate() {
            checksum.store(self.plan.checksum(owned, bytes, block), Ordering::Relaxed);
        }
        let slot = state.entries[owned.index()].slot;
        self.submit_write(state, owned, slot, vec![self.plan.state_part(owned, slot)], held.region);
    }

    fn submit_write(
        self: &Arc<Self>,
        state: &mut PagerState,
        owned: OwnedShard,
        slot: u8,
        parts: Vec<Part>,
        buffer: Region,
    ) {
        let entry = &mut state.entries[owned.index()];
        (entry.holding, entry.slot, entry.blank) = (Holding::Writing, slot, false);
        state.writing += 1;
        let file = self.plan.shards[owned.index()].file;
        state.debts.asked(file, Instant::now());
        let bytes: usize = parts.iter().map(|part| part.range.len()).sum();
        self.written.fetch_add(bytes as u64, Ordering::Relaxed);
        let pager = Arc::clone(self);
        let done = Box::new(move |region: Region, result: std::io::Result<()>| {
            pager.written(owned, region, result);
        });
        let disk = &self.disks[file];
        disk.submit(Request { direction: Direction::Write, parts, buffer, done });
    }

    fn written(self: &Arc<Self>, owned: OwnedShard, region: Region, result: std::io::Result<()>) {
        let mut state = self.lock();
        state.debts.answered(self.plan.shards[owned.index()].file, Instant::now());
        state.writing -= 1;
        if self.resident[owned.index()] {
            state.entries[owned.index()].holding =
                Holding::Ready(Held { region, checked: true, dirty: false });
        } else {
            state.entries[owned.index()].holding = Holding::Disk;
            state.free.push(region);
        }
        match result {
            Ok(()) => self.read_ahead(&mut state),
            Err(error) => {
                let fault = self.io_fault(owned, "write", error);
                tracing::error!(%fault, "the store has failed");
                state.failed.get_or_insert(fault);
            }
        }
        let failed = state.failed.is_some();
        drop(state);
        self.changed.notify_all();
        if failed {
            (self.notify)();
        }
    }

    fn io_fault(&self, owned: OwnedShard, doing: &'static str, error: std::io::Error) -> Fault {
        let place = &self.plan.shards[owned.index()];
        let path = self.disks[place.file].path();
        let fault = io(doing, path)(error);
        Fault { value: format!("{} of {}", fault.value, place.shard), ..fault }
    }

    /// Writes all loaded shards and waits for the writes.
    pub(in crate::tier::nvme) fn write_loaded(self: &Arc<Self>) -> Result<(), Fault> {
        for owned in OwnedShards::all(self.plan.shards.len()) {
            let mut state = self.lock();
            state.check()?;
            if let Holding::Ready(held) = &state.entries[owned.index()].holding
                && held.dirty
            {
                self.write_dirty(&mut state, owned);
            } else if state.entries[owned.index()].blank {
                return Err(internal(self.plan.shards[owned.index()].shard, "loaded before the start"));
            }
        }
        self.wait_for_writes()
    }

    /// Waits until no transfer is in flight, failed or not.
    pub(in crate::tier::nvme) fn quiesce(&self) {
        let moving = |entry: &Entry| matches!(entry.holding, Holding::Reading | Holding::Writing);
        let mut state = self.lock();
        while state.failed.is_none() && state.entries.iter().any(moving) {
            state = self.wait(state);
        }
    }
}
