//! The `nvme` tier: state on local disks, with two slots a shard. Every version is durable before the next is decided.
//!
//! Every step rewrites all state anyway, so the version before costs space and no bandwidth. [`plan::StorePlan`] has
//! the format, and the reason why a crash at any instant is survived.
//!
//! **Verification.** A block's checksum is compared after each read, before the block is used. Recovery reads every
//! block of its version before a step is made. If a block is damaged, the version before can still be taken then.
//!
//! **Residency.** A fixed share of the shards stays in DRAM, spread evenly: reads of the other shards hide behind
//! updates. An LRU cache would have no hits, since access is cyclic. Resident shards are still written, so that their
//! versions outlive the process. With a share r resident a step moves (2 - r) times the state. If resident shards'
//! gradients were logged instead, a sixth of these writes would do, but recovery would replay several steps. Writes are
//! twice as fast as reads on the measured devices, so gradients are not logged.
//!
//! **Failure.** The first failed read, write or flush fails the store for good. A retry would lie: after a failed flush
//! the kernel reports success for pages that it has dropped.

mod bench;
mod debts;
mod durable;
mod gradients;
mod images;
mod inspect;
mod open;
mod pager;
mod parts;
mod plan;
mod ranks;
mod recover;

use std::{
    ops::Range,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use longshore_proto::{Fault, Rank, Version};

pub use self::bench::{StorageMeasurement, bench};
use self::{
    durable::{VersionWriter, WriterThread},
    inspect::check_version,
    pager::{BlockChecksums, ShardPager},
    parts::ReadWindow,
    plan::{Slots, StorePlan},
    ranks::Ranks,
    recover::{Blocks, damaged, remedy},
};
pub(super) use self::{
    inspect::inspect,
    open::{need, open, shard_space},
};
use super::{
    contract::{Durable, Taken, Tier, WriteBehind},
    fault::{corrupt, internal},
    folder::{Folder, paths},
    record::crc64,
    state::{Guard, Guarded, StateMut, StateRef, Turn},
    stored::remove_all,
};
use crate::{
    ids::OwnedShard,
    lock,
    record::{Joined, Record},
};

pub(super) struct NvmeTier {
    /// Declared first, so that its thread has ended before any other field is dropped.
    writer_thread: WriterThread,
    writer: Arc<VersionWriter>,
    pager: Arc<ShardPager>,
    recovery: Mutex<Option<Recovery>>,
    reads: Arc<ReadWindow>,
    ranks: Ranks,
    folders: Vec<Folder>,
}

/// A recovered version, until it is adopted.
struct Recovery {
    record: Record,
    slots: Slots,
    /// The version before the recovered one. Its slots may be whole.
    previous: Option<Version>,
    /// Newer versions that have a record and are given up.
    newer: Vec<Version>,
}

/// Compares a block's checksum before its update, and takes the new one afterwards.
struct ChecksumGuard<'a> {
    checksums: &'a BlockChecksums,
    image_slot: usize,
    /// True if the block was read and not compared yet.
    check: bool,
    damaged: AtomicUsize,
    /// Targets of the blocks' new images; empty unless images are stored.
    images: Vec<Mutex<&'a mut [u8]>>,
}

impl Guard for ChecksumGuard<'_> {
    fn begin(&self, block: usize, state: StateRef<'_>) -> Turn {
        if self.check && crc64(state.arrays) != self.checksums.state[block].load(Ordering::Relaxed) {
            self.damaged.fetch_min(block, Ordering::Relaxed);
            return Turn::Damaged;
        }
        Turn::Go(0)
    }

    fn end(&self, block: usize, _: usize, state: StateRef<'_>, image: &[u8]) {
        self.checksums.state[block].store(crc64(state.arrays), Ordering::Relaxed);
        if let Some(target) = self.images.get(block) {
            lock(target).copy_from_slice(image);
            self.checksums.images[self.image_slot][block].store(crc64([image]), Ordering::Relaxed);
        }
    }
}

impl NvmeTier {
    fn plan(&self) -> &StorePlan {
        &self.pager.plan
    }

    fn damage(&self, owned: OwnedShard, block: usize, found: u64) -> Fault {
        let place = &self.plan().shards[owned.index()];
        let expected = self.pager.checksums[owned.index()].state[block].load(Ordering::Relaxed);
        let slot = self.pager.lock().slots.state;
        let what = format!("{}, block {block} of it, slot {slot}", place.shard);
        let path = self.pager.disks[place.file].path();
        self.pager.fail(damaged(path, what, found, expected, remedy(self.whole_previous())))
    }

    /// Returns the version before the recovered one, if every byte is as written. Called once a block of the newer
    /// version is damaged.
    fn whole_previous(&self) -> Option<Version> {
        let previous = lock(&self.recovery).as_ref()?.previous?;
        self.pager.quiesce();
        let records = self.records().ok()?;
        let stored = records.valid.get(&previous)?;
        let check = |file: usize| {
            let (disk, meta) = (&*self.pager.disks[file], &self.writer.meta[file]);
            check_version(self.plan(), self.pager.server, file, disk, meta, stored)
                .is_ok_and(|report| report.damaged.is_empty())
        };
        (0..self.pager.disks.len()).all(check).then_some(previous)
    }

    /// Reads bytes of an array from a drive. None if memory has the shard, or if a block differs from its checksum.
    fn part_at_rest(&self, owned: OwnedShard, array: usize, bytes: Range<usize>) -> Option<Vec<u8>> {
        let slot = self.pager.state_at_rest(owned)?;
        let place = &self.plan().shards[owned.index()];
        let (disk, meta) = (&*self.pager.disks[place.file], &self.writer.meta[place.file]);
        let (reads, arrays) = (Blocks { plan: self.plan(), disk, meta }, place.shape.block());
        let (length, before) = (arrays[array], arrays[..array].iter().sum::<usize>());
        let (first, end) = (bytes.start / length, bytes.end.div_ceil(length));
        let mut found = Vec::with_capacity((end - first) * length);
        for block in first..end {
            let state = reads.state_bytes(owned, slot, block).ok()?;
            let expected = self.pager.checksums[owned.index()].state[block].load(Ordering::Relaxed);
            found.extend_from_slice(&state[before..before + length]);
            if crc64([&*state]) != expected {
                return None;
            }
        }
        found.truncate(bytes.end - first * length);
        found.drain(..bytes.start - first * length);
        Some(found)
    }

    fn verify(&self, owned: OwnedShard, bytes: &[u8]) -> Result<(), Fault> {
        for (block, checksum) in self.pager.checksums[owned.index()].state.iter().enumerate() {
            let found = self.plan().checksum(owned, bytes, block);
            if found != checksum.load(Ordering::Relaxed) {
                return Err(self.damage(owned, block, found));
            }
        }
        Ok(())
    }
}

impl Tier for NvmeTier {
    fn make_room(&self, owned: OwnedShard) -> Result<(), Fault> {
        self.pager.make_room(owned)
    }

    fn load(&self, owned: OwnedShard, load: &mut dyn FnMut(StateMut<'_>)) -> Result<(), Fault> {
        if self.pager.is_blank(owned) {
            // The space of a shard that comes back may have been given back after room was made for it.
            self.pager.make_room(owned)?;
        }
        let mut held = self.pager.take(owned)?;
        let bytes = &mut held.region.bytes_mut()[..self.plan().shards[owned.index()].state_bytes];
        // A shard that was written out between two parts of the load comes back unchecked, so it is verified. A shard
        // without an earlier part has no checksums yet, and counts as checked.
        if !held.checked {
            self.verify(owned, bytes)?;
        }
        load(self.plan().cut(owned, bytes));
        (held.checked, held.dirty) = (true, true);
        self.pager.keep(owned, held);
        Ok(())
    }

    fn read(&self, owned: OwnedShard, read: &mut dyn FnMut(StateRef<'_>)) -> Result<(), Fault> {
        let mut held = self.pager.take(owned)?;
        let bytes = &held.region.bytes()[..self.plan().shards[owned.index()].state_bytes];
        if !held.checked {
            self.verify(owned, bytes)?;
        }
        read(self.plan().cut_ref(owned, bytes));
        held.checked = true;
        self.pager.keep(owned, held);
        Ok(())
    }

    fn read_part(
        &self,
        owned: OwnedShard,
        array: usize,
        bytes: Range<usize>,
        read: &mut dyn FnMut(&[u8]),
    ) -> Result<(), Fault> {
        match self.part_at_rest(owned, array, bytes.clone()) {
            Some(found) => read(&found),
            // The shard is in memory, or an update has changed it meanwhile. If a block is damaged, this read finds
            // that again.
            None => self.read(owned, &mut |state| read(&state.arrays[array][bytes.clone()]))?,
        }
        Ok(())
    }

    fn read_frozen(
        &self,
        owned: OwnedShard,
        bytes: Range<usize>,
        read: &mut dyn FnMut(&[u8]),
    ) -> Result<(), Fault> {
        if self.pager.is_resident(owned) {
            return self.read_part(owned, 0, bytes, read);
        }
        self.read_frozen_part(owned, bytes, read)
    }

    fn read_frozen_ahead(&self, owned: OwnedShard, bytes: Range<usize>) {
        if !self.pager.is_resident(owned) && self.pager.failure().is_none() {
            self.frozen_ahead(owned, bytes);
        }
    }

    fn release(&self, owned: OwnedShard) {
        self.pager.release(owned);
    }

    fn update(
        &self,
        run: &[OwnedShard],
        version: Version,
        update: &mut dyn FnMut(Vec<Guarded<'_>>),
    ) -> Result<(), Fault> {
        run.iter().try_for_each(|&owned| self.update_shard(owned, version, update))
    }
}

impl NvmeTier {
    fn update_shard(
        &self,
        owned: OwnedShard,
        version: Version,
        update: &mut dyn FnMut(Vec<Guarded<'_>>),
    ) -> Result<(), Fault> {
        let (durable, finished) = {
            let state = self.pager.lock();
            (state.durable, state.version())
        };
        let is_next = |before: Version| before.next_step().version() == version;
        if !durable.is_none_or(is_next) || !is_next(finished) {
            return Err(internal(version, "the one after the durable version"));
        }
        let mut held = self.pager.take(owned)?;
        let place = &self.plan().shards[owned.index()];
        let (state, image) = held.region.bytes_mut()[..place.bytes()].split_at_mut(place.state_bytes);
        let block = image.len() / place.blocks();
        let target = self.pager.lock().slots.updated();
        let guard = ChecksumGuard {
            checksums: &self.pager.checksums[owned.index()],
            image_slot: target.image as usize,
            check: !held.checked,
            damaged: AtomicUsize::new(usize::MAX),
            images: if block > 0 { image.chunks_mut(block).map(Mutex::new).collect() } else { Vec::new() },
        };
        update(vec![(self.plan().cut(owned, state), &guard)]);
        let damaged = guard.damaged.load(Ordering::Relaxed);
        drop(guard);
        if damaged < usize::MAX {
            let bytes = &held.region.bytes()[..place.state_bytes];
            return Err(self.damage(owned, damaged, self.plan().checksum(owned, bytes, damaged)));
        }
        self.pager.write(owned, held);
        Ok(())
    }
}

impl Durable for NvmeTier {
    fn start(&self, record: &Record) -> Result<(), Fault> {
        let may_lack = record.placement.is_some();
        self.pager.write_loaded(may_lack).map_err(|fault| self.pager.fail(fault))?;
        let slots = self.pager.lock().slots;
        self.writer.make_durable(record, slots, true)?;
        self.pager.advance(slots, record.version);
        Ok(())
    }

    fn decide(&self, record: &Record) -> Result<(), Fault> {
        self.pager.decided(record.is_skipped());
        Ok(())
    }

    fn stand(&self, record: &Record) -> Result<(), Fault> {
        let (slots, durable) = {
            let state = self.pager.lock();
            (state.slots, state.durable)
        };
        if durable != Some(record.version) {
            return Err(internal(record.version, "the durable version"));
        }
        self.writer.publish(record, slots, true).map_err(|fault| self.pager.fail(fault))
    }

    fn place(&self, record: &Record) -> Result<(), Fault> {
        let slots = self.pager.lock().slots;
        self.writer.place(record, slots).map_err(|fault| self.pager.fail(fault))
    }

    fn joined(&self, rank: Rank, joined: Joined, _over: bool) {
        self.ranks.joined(rank.index(), joined);
    }

    fn keep_joined(&self) -> Result<(), Fault> {
        let written = self.ranks.keep().map_err(|fault| self.pager.fail(fault))?;
        self.pager.written.fetch_add(written, Ordering::Relaxed);
        Ok(())
    }

    fn who_joined(&self) -> Vec<Option<Joined>> {
        self.ranks.all()
    }

    fn discard(&self) -> Result<(), Fault> {
        // A version that is written as its folders go would fail, and be logged as lost.
        self.writer_thread.end();
        self.pager.quiesce();
        self.pager.fail(corrupt("the job's folders (removed)", "there", "open the job again"));
        remove_all(&paths(&self.folders))
    }
}

impl WriteBehind for NvmeTier {
    fn adopt(&self) -> Result<(), Fault> {
        let Some(recovery) = lock(&self.recovery).take() else { return Ok(()) };
        let adopted = recovery
            .newer
            .iter()
            .try_for_each(|&version| self.writer.erase(version))
            .and_then(|()| self.writer.publish(&recovery.record, recovery.slots, true));
        adopted.map_err(|fault| self.pager.fail(fault))
    }

    fn finish(&self, record: &Record) -> Result<(), Fault> {
        let before = {
            let state = self.pager.lock();
            if record.version != state.version().next_step().version() {
                return Err(internal(record.version, "the one after the last that was finished"));
            }
            state.slots
        };
        let slots = if record.is_skipped() { before.skipped() } else { before.updated() };
        self.pager.advance(slots, record.version);
        self.writer_thread.send(record.clone(), slots);
        Ok(())
    }

    fn durable(&self) -> Version {
        self.pager.lock().durable.unwrap_or(Version(0))
    }

    fn written_bytes(&self) -> u64 {
        self.pager.written.load(Ordering::Relaxed)
    }

    fn taken(&self) -> Taken {
        self.pager.taken()
    }

    fn failure(&self) -> Option<Fault> {
        self.pager.failure()
    }
}

impl Drop for NvmeTier {
    fn drop(&mut self) {
        // The device must not write after the folders' locks are given up.
        self.pager.quiesce();
    }
}
