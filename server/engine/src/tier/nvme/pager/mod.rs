//! Shards on their way between disk and update: a bounded set of buffers, with prefetches and writes behind.

mod moves;

use std::{
    mem,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use longshore_proto::{Fault, FaultKind, Version};

use super::{
    super::{contract::Taken, fault::FIELD},
    debts::Debts,
    plan::{IMAGE_SLOTS, StorePlan},
    slots::Slots,
};
use crate::{
    ids::{OwnedShard, OwnedShards},
    io::Disk,
    lock,
    memory::Region,
};

pub(super) struct ShardPager {
    pub(super) plan: StorePlan,
    pub(super) disks: Vec<Arc<dyn Disk>>,
    /// By owned shard.
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

/// The block checksums of a shard.
pub(super) struct BlockChecksums {
    /// Checksums of the state as last updated, wherever the state lies now.
    pub(super) state: Vec<AtomicU64>,
    /// Checksums of the images, by image slot. A frozen shard has zeros, so that a table has a row for each
    /// block.
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
    /// The step that makes the next version is skipped.
    skipping: bool,
    pub(super) durable: Option<Version>,
    failed: Option<Fault>,
}

struct Entry {
    holding: Holding,
    /// The slot that holds its state on disk.
    slot: u8,
    /// The shard was never loaded: its state is zeros, and nothing is on disk.
    blank: bool,
    /// Time of the last use; larger is later.
    used: u64,
}

enum Holding {
    Disk,
    Reading,
    Ready(Held),
    /// A thread has it.
    Busy,
    Writing,
}

/// A shard's bytes in memory, which `take` gives out. `keep` or `write` takes them back.
pub(super) struct Held {
    pub(super) region: Region,
    /// The bytes were compared with their checksums since they were read.
    pub(super) checked: bool,
    /// The bytes were loaded and not written yet.
    pub(super) dirty: bool,
}

impl ShardPager {
    pub(super) fn new(
        plan: StorePlan,
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
            let held = |region| Holding::Ready(Held { region, checked: true, dirty: true });
            Entry { holding: region.map_or(Holding::Disk, held), slot: 0, blank: true, used: 0 }
        });
        let (entries, buffers) = (entries.collect(), free.len());
        let (slots, durable, failed) = (Slots::default(), None, None);
        let (version, skipping) = (Version(0), false);
        let (next, writing, clock) = (OwnedShard(0), 0, 0);
        let debts = Debts::new(disks.len());
        let state = PagerState {
            entries,
            free,
            next,
            writing,
            debts,
            clock,
            slots,
            version,
            skipping,
            durable,
            failed,
        };
        let (state, changed) = (Mutex::new(state), Condvar::new());
        let (written, taken, resident) = (AtomicU64::new(0), Default::default(), is_resident);
        ShardPager { plan, disks, checksums, written, taken, resident, buffers, state, changed, notify }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, PagerState> {
        lock(&self.state)
    }

    pub(super) fn is_resident(&self, owned: OwnedShard) -> bool {
        self.resident[owned.index()]
    }

    /// Waits for a change. A drive that owes an answer for too long fails the store; a thread that holds a
    /// shard does not.
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
        let path = self.disks[silent.drive].path().display();
        let value = format!("{path} (silent for {} s, owing {} answers)", silent.seconds, silent.requests);
        let remedy = "see the kernel's log for the device";
        let fault = Fault::new(FaultKind::Deadline, FIELD, value, "answering", remedy);
        state.failed.get_or_insert(fault);
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

    /// Notes that a shard's drive got a request beside the pager's own.
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
                            return Ok(Held { region, checked: true, dirty: true });
                        }
                        self.read(&mut state, owned, region);
                    }
                }
                other => entry.holding = other,
            }
            state = self.wait(state);
        }
    }

    /// Returns where shards were when they were taken.
    pub(super) fn taken(&self) -> Taken {
        let [resident, ahead, waited] = self.taken.each_ref().map(|count| count.load(Ordering::Relaxed));
        Taken { resident, ahead, waited }
    }

    /// Gives back a shard that was only read or loaded.
    pub(super) fn keep(self: &Arc<Self>, owned: OwnedShard, held: Held) {
        let mut state = self.lock();
        let count = state.entries.len();
        // No update takes a frozen shard.
        let soon = !self.plan.shards[owned.index()].frozen
            && (owned.index() + count - state.next.index()) % count < self.buffers;
        if held.dirty || self.resident[owned.index()] || soon {
            state.entries[owned.index()].blank &= !held.dirty;
            state.entries[owned.index()].holding = Holding::Ready(held);
        } else {
            state.entries[owned.index()].holding = Holding::Disk;
            state.free.push(held.region);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Begins with every shard in this slot, as in a recovered store. The resident shards are read first of all.
    pub(super) fn recovered(self: &Arc<Self>, slots: Slots, version: Version) -> Result<(), Fault> {
        let mut state = self.lock();
        (state.slots, state.version) = (slots, version);
        for entry in &mut state.entries {
            (entry.slot, entry.blank) = (slots.state, false);
        }
        for owned in OwnedShards::all(self.resident.len()).filter(|&owned| self.resident[owned.index()]) {
            let holding = mem::replace(&mut state.entries[owned.index()].holding, Holding::Disk);
            if let Holding::Ready(held) = holding {
                self.read(&mut state, owned, held.region);
            }
        }
        self.read_ahead(&mut state);
        Ok(())
    }

    /// The next version starts at the first shard.
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

    /// Returns the slot of a shard's image of a version that the shard has, once all of it is on disk there.
    /// None if it is not there any more.
    pub(super) fn stored_image(&self, owned: OwnedShard, version: Version) -> Result<Option<u8>, Fault> {
        let mut slot = None;
        self.until(|state| {
            slot = state.image_slot(version);
            !matches!(state.entries[owned.index()].holding, Holding::Writing)
        })?;
        Ok(slot)
    }

    /// Returns [`ShardPager::stored_image`] without waiting. None also while the image is on its way there.
    pub(super) fn image_at_rest(&self, owned: OwnedShard, version: Version) -> Option<u8> {
        let state = self.lock();
        let at_rest = !matches!(state.entries[owned.index()].holding, Holding::Writing);
        state.image_slot(version).filter(|_| at_rest && state.failed.is_none())
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

    pub(super) fn check(&self) -> Result<(), Fault> {
        self.failed.clone().map_or(Ok(()), Err)
    }
}
