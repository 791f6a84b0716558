//! The pager: a bounded set of buffers between disks and updates, with reads ahead and writes behind. The compute
//! thread takes shards, the disks' threads bring them, and the version writer waits for writes.

mod moved;

use std::{
    mem,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use longshore_proto::{Fault, ServerId, Version};

use super::{
    super::{
        contract::Taken,
        fault::{internal, io},
    },
    debts::Debts,
    plan::{Apart, IMAGE_SLOTS, STATE_SLOTS, Slots, StorePlan},
};
use crate::{
    ids::OwnedShard,
    io::{Direction, Disk, Part, Request},
    lock,
    memory::Region,
    record::Record,
};

pub(super) struct ShardPager {
    pub(super) plan: StorePlan,
    pub(super) server: ServerId,
    pub(super) disks: Vec<Arc<dyn Disk>>,
    pub(super) checksums: Vec<BlockChecksums>,
    /// Bytes handed to the drives to write.
    pub(super) written: AtomicU64,
    /// Number of shards by their place when they were taken: resident, prefetched, on a drive.
    taken: [AtomicU64; 3],
    resident: Vec<bool>,
    buffers: usize,
    state: Mutex<PagerState>,
    changed: Condvar,
    notify: Box<dyn Fn() + Send + Sync>,
}

pub(super) struct BlockChecksums {
    /// Checksums of the state as last updated, in memory or on disk.
    pub(super) state: Vec<AtomicU64>,
    /// Checksums of the images, by image slot. A frozen shard's checksums are 0 here: the shard has no images, but a
    /// table has a row for each block.
    pub(super) images: [Vec<AtomicU64>; IMAGE_SLOTS as usize],
}

pub(super) struct PagerState {
    entries: Vec<Entry>,
    free: Vec<Region>,
    /// The shard that is updated next.
    next: OwnedShard,
    /// Number of requests that write.
    writing: usize,
    debts: Debts,
    clock: u64,
    pub(super) slots: Slots,
    /// The version that `slots` hold.
    version: Version,
    /// True if the step that makes the next version is skipped.
    skipping: bool,
    pub(super) durable: Option<Version>,
    failed: Option<Fault>,
}

struct Entry {
    holding: Holding,
    /// The slot of the shard's state on disk.
    slot: u8,
    /// True if the shard was never loaded: its state is zeros, without bytes on disk.
    blank: bool,
    /// True if the table of the slot has the shard's checksums. False for a shard that was fetched and not updated
    /// since.
    tabled: bool,
    /// True if a record names the slot.
    named: bool,
    /// Version at which this server released the shard. None once the space is given back.
    released_at: Option<Version>,
    /// Slots of fetched images, as bits. The tables of these slots lack the checksums of these images.
    fetched_images: u8,
    /// Time of the last use; larger is later.
    used: u64,
}

enum Holding {
    Disk,
    Reading,
    Ready(Held),
    /// A thread has the shard.
    Busy,
    Writing,
}

/// A shard's bytes in memory. `take` gives them out, and `keep` or `write` takes them back.
pub(super) struct Held {
    pub(super) region: Region,
    /// True if the bytes were compared with their checksums since they were read.
    pub(super) checked: bool,
    /// True if the bytes were loaded and not written yet.
    pub(super) dirty: bool,
}

impl ShardPager {
    pub(super) fn new(
        plan: StorePlan,
        server: ServerId,
        disks: Vec<Arc<dyn Disk>>,
        free: Vec<Region>,
        resident: Vec<Option<Region>>,
        notify: Box<dyn Fn() + Send + Sync>,
    ) -> ShardPager {
        let cells = |count: usize| (0..count).map(|_| AtomicU64::new(0)).collect::<Vec<_>>();
        let checksums = plan.shards.iter().map(|place| BlockChecksums {
            state: cells(place.blocks()),
            images: [(); IMAGE_SLOTS as usize].map(|()| cells(if plan.images { place.blocks() } else { 0 })),
        });
        let checksums = checksums.collect();
        let is_resident = resident.iter().map(Option::is_some).collect();
        let entries = resident.into_iter().map(|region| {
            let held = |region| Holding::Ready(Held { region, checked: true, dirty: false });
            Entry {
                holding: region.map_or(Holding::Disk, held),
                slot: 0,
                blank: true,
                tabled: false,
                named: false,
                fetched_images: 0,
                released_at: None,
                used: 0,
            }
        });
        let buffers = free.len();
        let state = PagerState {
            entries: entries.collect(),
            free,
            next: OwnedShard(0),
            writing: 0,
            debts: Debts::new(disks.len()),
            clock: 0,
            slots: Slots::default(),
            version: Version(0),
            skipping: false,
            durable: None,
            failed: None,
        };
        ShardPager {
            plan,
            server,
            disks,
            checksums,
            written: AtomicU64::new(0),
            taken: Default::default(),
            resident: is_resident,
            buffers,
            state: Mutex::new(state),
            changed: Condvar::new(),
            notify,
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, PagerState> {
        lock(&self.state)
    }

    pub(super) fn is_blank(&self, owned: OwnedShard) -> bool {
        self.lock().entries[owned.index()].blank
    }

    pub(super) fn is_resident(&self, owned: OwnedShard) -> bool {
        self.resident[owned.index()]
    }

    /// Waits for a change. A drive that owes an answer for too long fails the store. There is no other limit, since a
    /// thread may hold a shard for any time.
    fn wait<'a>(&self, state: MutexGuard<'a, PagerState>) -> MutexGuard<'a, PagerState> {
        let patience = state.debts.patience(Instant::now());
        let waited = self.changed.wait_timeout(state, patience).unwrap_or_else(PoisonError::into_inner);
        let mut state = waited.0;
        self.look(&mut state);
        state
    }

    /// Fails the store where a drive owes an answer for too long.
    fn look(&self, state: &mut PagerState) {
        let Some(silent) = state.debts.silent(Instant::now()) else { return };
        state.failed.get_or_insert(silent.fault(self.disks[silent.drive].path()));
    }

    /// Waits until `done` returns true. An earlier failure ends the wait.
    pub(super) fn until(&self, mut done: impl FnMut(&mut PagerState) -> bool) -> Result<(), Fault> {
        let mut state = self.lock();
        loop {
            state.check()?;
            if done(&mut state) {
                return Ok(());
            }
            state = self.wait(state);
        }
    }

    pub(super) fn wait_for_writes(&self) -> Result<(), Fault> {
        self.until(|state| state.writing == 0)
    }

    /// Fails the store for good. The first fault stays.
    pub(super) fn fail(&self, fault: Fault) -> Fault {
        let mut state = self.lock();
        let first = state.failed.get_or_insert(fault).clone();
        drop(state);
        self.tell();
        first
    }

    pub(super) fn failure(&self) -> Option<Fault> {
        self.lock().failed.clone()
    }

    /// Returns the failure that makes a wait for a drive hopeless.
    pub(super) fn hopeless(&self) -> Option<Fault> {
        let mut state = self.lock();
        self.look(&mut state);
        state.failed.clone()
    }

    /// Notes a request to a shard's drive that the pager has not made.
    pub(super) fn asked(&self, owned: OwnedShard) {
        self.lock().debts.asked(self.plan.shards[owned.index()].file, Instant::now());
    }

    pub(super) fn answered(&self, owned: OwnedShard) {
        self.lock().debts.answered(self.plan.shards[owned.index()].file, Instant::now());
    }

    pub(super) fn tell(&self) {
        self.changed.notify_all();
        (self.notify)();
    }

    /// Takes a shard's bytes. Reads them from disk unless they are in memory already.
    pub(super) fn take(self: &Arc<Self>, owned: OwnedShard) -> Result<Held, Fault> {
        let mut state = self.lock();
        let entry = &state.entries[owned.index()];
        if !entry.blank {
            let place = match entry.holding {
                _ if self.resident[owned.index()] => 0,
                Holding::Ready(_) => 1,
                _ => 2,
            };
            self.taken[place].fetch_add(1, Ordering::Relaxed);
        }
        loop {
            state.check()?;
            state.clock += 1;
            let clock = state.clock;
            let entry = &mut state.entries[owned.index()];
            entry.used = clock;
            match mem::replace(&mut entry.holding, Holding::Busy) {
                Holding::Ready(held) => return Ok(held),
                Holding::Disk => {
                    let blank = entry.blank;
                    entry.holding = Holding::Disk;
                    if let Some(mut region) = self.buffer(&mut state, owned)? {
                        if blank {
                            region.bytes_mut().fill(0);
                            state.entries[owned.index()].holding = Holding::Busy;
                            return Ok(Held { region, checked: true, dirty: false });
                        }
                        self.read(&mut state, owned, region);
                    }
                }
                other => entry.holding = other,
            }
            state = self.wait(state);
        }
    }

    pub(super) fn taken(&self) -> Taken {
        let [resident, ahead, waited] = self.taken.each_ref().map(|count| count.load(Ordering::Relaxed));
        Taken { resident, ahead, waited }
    }

    /// Gives back a shard that was only read or loaded.
    pub(super) fn keep(self: &Arc<Self>, owned: OwnedShard, held: Held) {
        let mut state = self.lock();
        let soon = self.in_turn(&state).take(self.buffers).any(|next| next == owned);
        if held.dirty || self.resident[owned.index()] || soon {
            let entry = &mut state.entries[owned.index()];
            if held.dirty {
                // A record may still name the slot of a shard that returns, so the other slot is written.
                entry.slot = (entry.slot + u8::from(entry.named)) % STATE_SLOTS;
                (entry.blank, entry.tabled, entry.named) = (false, false, false);
            }
            entry.holding = Holding::Ready(held);
        } else {
            state.entries[owned.index()].holding = Holding::Disk;
            state.free.push(held.region);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Begins with a recovered store: each shard's state is in its slot of `slots`, unless the shard lies apart. All
    /// checksums are known. The resident shards are read first.
    pub(super) fn recovered(self: &Arc<Self>, slots: Slots, record: &Record, apart: &[Apart]) {
        let mut state = self.lock();
        (state.slots, state.version) = (slots, record.version);
        for (owned, entry) in state.entries.iter_mut().enumerate() {
            let is_here = self.kept(record, owned).is_some();
            (entry.slot, entry.blank, entry.tabled, entry.named) = (slots.state, !is_here, is_here, is_here);
        }
        for Apart { owned, slot, images, .. } in apart {
            let Some(owned) = self.plan.order.get(*owned).map(|owned| owned.index()) else { continue };
            let entry = &mut state.entries[owned];
            (entry.slot, entry.blank, entry.tabled) = (slot.unwrap_or_default(), slot.is_none(), false);
            entry.fetched_images = images.iter().fold(0, |slots, (slot, _)| slots | 1 << slot);
        }
        for owned in OwnedShard::all(self.resident.len()).filter(|&owned| self.is_resident(owned)) {
            let entry = &mut state.entries[owned.index()];
            if !entry.blank
                && let Holding::Ready(held) = mem::replace(&mut entry.holding, Holding::Disk)
            {
                self.read(&mut state, owned, held.region);
            }
        }
        self.read_ahead(&mut state);
    }

    /// Begins the next version, whose updates start at the first shard.
    pub(super) fn advance(self: &Arc<Self>, slots: Slots, version: Version) {
        let mut state = self.lock();
        (state.slots, state.version) = (slots, version);
        state.next = OwnedShard(0);
        self.read_ahead(&mut state);
    }

    /// Notes that the next version is decided.
    pub(super) fn decided(&self, skip: bool) {
        self.lock().skipping = skip;
    }

    /// Returns the slot of a shard's image of a version, once the image is whole on disk. None if it is no longer
    /// there.
    pub(super) fn stored_image(&self, owned: OwnedShard, version: Version) -> Result<Option<u8>, Fault> {
        let mut slot = None;
        self.until(|state| {
            slot = state.image_slot(version);
            !matches!(state.entries[owned.index()].holding, Holding::Writing)
        })?;
        Ok(slot)
    }

    /// Returns the slot of a shard's state, if the state lies on its drive alone.
    pub(super) fn state_at_rest(&self, owned: OwnedShard) -> Option<u8> {
        let state = self.lock();
        let entry = &state.entries[owned.index()];
        let at_rest = matches!(entry.holding, Holding::Disk) && !entry.blank && state.failed.is_none();
        at_rest.then_some(entry.slot)
    }

    /// Returns the slot as [`ShardPager::stored_image`] does, but never waits: also None during the image's write.
    pub(super) fn image_at_rest(&self, owned: OwnedShard, version: Version) -> Option<u8> {
        let state = self.lock();
        let at_rest = !matches!(state.entries[owned.index()].holding, Holding::Writing);
        state.image_slot(version).filter(|_| at_rest && state.failed.is_none())
    }
}

impl ShardPager {
    /// Returns a free buffer. None while no buffer is free; a change will announce one.
    fn buffer(self: &Arc<Self>, state: &mut PagerState, wanted: OwnedShard) -> Result<Option<Region>, Fault> {
        if let Some(region) = state.free.pop() {
            return Ok(Some(region));
        }
        if state.writing > 0 {
            return Ok(None);
        }
        // During training, buffers hold prefetched shards, and the shard that is needed last is evicted. Before the
        // start, buffers hold loaded shards: the least recently used one is written, then evicted.
        let count = state.entries.len();
        let distance = |owned: OwnedShard| (owned.index() + count - state.next.index()) % count;
        let ready = |owned: &OwnedShard| {
            let entry = &state.entries[owned.index()];
            *owned != wanted && !self.resident[owned.index()] && matches!(entry.holding, Holding::Ready(_))
        };
        let clean = |owned: &OwnedShard| ready(owned) && !state.entries[owned.index()].is_dirty();
        let clean = OwnedShard::all(count).filter(clean).max_by_key(|&owned| distance(owned));
        if let Some(owned) = clean {
            let held = mem::replace(&mut state.entries[owned.index()].holding, Holding::Disk);
            return Ok(if let Holding::Ready(held) = held { Some(held.region) } else { None });
        }
        let oldest =
            OwnedShard::all(count).filter(ready).min_by_key(|&owned| state.entries[owned.index()].used);
        if let Some(owned) = oldest {
            self.write_dirty(state, owned);
        }
        Ok(None)
    }

    /// Starts reading a shard.
    fn read(self: &Arc<Self>, state: &mut PagerState, owned: OwnedShard, buffer: Region) {
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

    /// Prefetches the next shards in forward order, as far as there are buffers.
    fn read_ahead(self: &Arc<Self>, state: &mut PagerState) {
        let ahead: Vec<OwnedShard> = self.in_turn(state).take(self.buffers).collect();
        for owned in ahead {
            if !matches!(state.entries[owned.index()].holding, Holding::Disk) {
                continue;
            }
            let Some(region) = state.free.pop() else { return };
            self.read(state, owned, region);
        }
    }

    /// The shards that updates take from the drives, in forward order from the next one on. No update needs a frozen
    /// shard.
    fn in_turn<'a>(&'a self, state: &'a PagerState) -> impl Iterator<Item = OwnedShard> + 'a {
        let count = state.entries.len();
        let order = (0..count).map(move |step| OwnedShard((state.next.index() + step) % count));
        order.filter(|owned| {
            let is_read = !self.resident[owned.index()] && !self.plan.shards[owned.index()].frozen;
            is_read && !state.entries[owned.index()].blank
        })
    }

    /// Writes an updated shard in the background, and prefetches the next.
    pub(super) fn write(self: &Arc<Self>, owned: OwnedShard, held: Held) {
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

    /// Writes all loaded shards and waits for the writes. With `may_lack`, shards of other servers may be blank.
    pub(super) fn write_loaded(self: &Arc<Self>, may_lack: bool) -> Result<(), Fault> {
        for owned in OwnedShard::all(self.plan.shards.len()) {
            let mut state = self.lock();
            state.check()?;
            let (entry, place) = (&state.entries[owned.index()], &self.plan.shards[owned.index()]);
            if entry.is_dirty() && !(may_lack && entry.blank) {
                self.write_dirty(&mut state, owned);
            } else if entry.blank && !may_lack && place.opened {
                return Err(internal(place.shard, "loaded before the start"));
            }
        }
        self.wait_for_writes()
    }

    /// Waits until no transfer is in flight. After a failure waits for writes alone, and not for a silent drive.
    pub(super) fn quiesce(&self) {
        let moving = |entry: &Entry| matches!(entry.holding, Holding::Reading | Holding::Writing);
        let mut state = self.lock();
        while match state.failed {
            None => state.entries.iter().any(moving),
            Some(_) => state.writing > 0 && state.debts.silent(Instant::now()).is_none(),
        } {
            state = self.wait(state);
        }
    }
}

impl Entry {
    fn is_dirty(&self) -> bool {
        matches!(&self.holding, Holding::Ready(held) if held.dirty)
    }
}

impl PagerState {
    /// Returns the slot of a version's images, for the shards that have the version.
    pub(super) fn image_slot(&self, version: Version) -> Option<u8> {
        match version.0 {
            next if next == self.version.0 + 1 && self.skipping => Some(self.slots.image),
            next if next == self.version.0 + 1 => Some(self.slots.updated().image),
            current if current == self.version.0 => Some(self.slots.image),
            older if older + 1 == self.version.0 => self.slots.older_image,
            _ => None,
        }
    }

    pub(super) fn version(&self) -> Version {
        self.version
    }

    pub(super) fn check(&self) -> Result<(), Fault> {
        self.failed.clone().map_or(Ok(()), Err)
    }
}
