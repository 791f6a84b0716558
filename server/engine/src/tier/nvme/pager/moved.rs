//! Shards that come to this server and leave it: written when they were fetched, named apart by records while no table
//! covers them, and given back once no record names them.
//!
//! The version writer's thread calls this for each version. Placement changes between two steps, and the job's handovers,
//! call on their own threads.

use std::{
    mem,
    ops::RangeInclusive,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use longshore_proto::{Fault, Version};

use super::{
    super::super::fault::{corrupt, io, without_place},
    super::plan::{Apart, ApartChecksums, Digest, Slots},
    Entry, Holding, PagerState, ShardPager,
};
use crate::{ids::OwnedShard, record::Record};

const LOST: &str =
    "see the host's memory and drives, and start the server again: it goes on from the version before";

/// Number of versions after a shard's release from which on no record names the shard. Records of two versions are
/// kept, and a third may be on its way.
const NAMED_BY: u64 = 3;

impl ShardPager {
    /// Takes the checksums of a shard that lies apart.
    pub(in crate::tier::nvme) fn lies_apart(&self, owned: OwnedShard, checksums: &ApartChecksums) {
        let cells = &self.checksums[owned.index()];
        let ApartChecksums { state, images } = checksums;
        let images = images.iter().filter_map(|(slot, of)| Some((cells.images.get(*slot as usize)?, of)));
        for (cells, checksums) in images.chain([(&cells.state, state)]) {
            cells.iter().zip(checksums).for_each(|(cell, &checksum)| cell.store(checksum, Ordering::Relaxed));
        }
    }

    /// Starts writing the shards that were fetched since the last version, and not updated for this one. Returns true
    /// if the version's tables do not cover all of its shards.
    pub(in crate::tier::nvme) fn write_fetched(
        self: &Arc<Self>,
        record: &Record,
        slots: Slots,
    ) -> Result<bool, Fault> {
        let is_untabled = |state: &PagerState, owned: OwnedShard| {
            let (entry, versions) = (&state.entries[owned.index()], self.kept(record, owned.index()));
            !entry.blank && !entry.tabled && versions.is_some_and(|of| *of.end() == record.version)
        };
        let is_fetched = |state: &PagerState, owned: OwnedShard| {
            let (entry, place) = (&state.entries[owned.index()], &self.plan.shards[owned.index()]);
            let is_dirty = matches!(&entry.holding, Holding::Ready(held) if held.dirty);
            is_untabled(state, owned) && (is_dirty || entry.slot != slots.state && !place.frozen)
        };
        let all = OwnedShard::all(self.plan.shards.len());
        let (fetched, has_untabled): (Vec<OwnedShard>, bool) = {
            let state = self.lock();
            let fetched = all.clone().filter(|&owned| is_fetched(&state, owned)).collect();
            (fetched, all.clone().any(|owned| is_untabled(&state, owned)))
        };
        for &owned in &fetched {
            let mut held = self.take(owned)?;
            let bytes = &held.region.bytes()[..self.plan.shards[owned.index()].state_bytes];
            let differs = |(block, cell): (usize, &AtomicU64)| {
                self.plan.checksum(owned, bytes, block) != cell.load(Ordering::Relaxed)
            };
            if !held.checked && self.checksums[owned.index()].state.iter().enumerate().any(differs) {
                let shard = self.plan.shards[owned.index()].shard;
                return Err(corrupt(format!("{shard}, as it was fetched"), "as it was written", LOST));
            }
            (held.checked, held.dirty) = (true, true);
            let mut state = self.lock();
            let entry = &mut state.entries[owned.index()];
            // The slot is set and the write begun under one lock. Between two locks, an eviction would write the shard
            // to its old slot. The next update writes the other slot.
            (entry.slot, entry.tabled, entry.holding) = (slots.state, false, Holding::Ready(held));
            self.write_dirty(&mut state, owned);
        }
        Ok(has_untabled)
    }

    /// Notes that an image was written to a slot outside of updates, so that the slot's table lacks its checksums.
    pub(in crate::tier::nvme) fn lacks_table(&self, owned: OwnedShard, image_slot: u8) {
        self.lock().entries[owned.index()].fetched_images |= 1 << image_slot;
    }

    /// Notes that the tables of a version's state and image are written, and with `first` the older image's.
    pub(in crate::tier::nvme) fn tabled(&self, record: &Record, slots: Slots, first: bool) {
        let mut state = self.lock();
        for (owned, (entry, place)) in state.entries.iter_mut().zip(&self.plan.shards).enumerate() {
            if entry.blank || self.kept(record, owned).is_none() {
                continue;
            }
            entry.tabled |= place.frozen || entry.slot == slots.state;
            let older = slots.older_image.filter(|_| !first).map_or(0, |slot| 1 << slot);
            entry.fetched_images &= older;
        }
    }

    /// The shards of a version that its tables do not cover.
    pub(in crate::tier::nvme) fn apart(&self, record: &Record, slots: Slots) -> Vec<Apart> {
        let mut state = self.lock();
        let apart = |(owned, entry): (usize, &mut Entry)| {
            let (place, cells) = (&self.plan.shards[owned], &self.checksums[owned]);
            let kept = self.kept(record, owned)?;
            entry.named = true;
            let owned = place.position?;
            if entry.blank {
                return Some(Apart { owned, slot: None, checksums: Digest::default(), images: Vec::new() });
            }
            let is_stored = |(version, _): &(Version, u8)| place.image_bytes > 0 && kept.contains(version);
            let mut images: Vec<u8> =
                slots.images(record.version).filter(is_stored).map(|(_, slot)| slot).collect();
            images.dedup();
            let is_made = *kept.end() == record.version && entry.slot == slots.state;
            let is_fetched = |slot: &u8| entry.fetched_images >> slot & 1 != 0;
            if entry.tabled && (place.frozen || is_made && !images.iter().any(is_fetched)) {
                return None;
            }
            let digest = |cells: &Vec<AtomicU64>| {
                let checksums = cells.iter().map(|cell| cell.load(Ordering::Relaxed));
                Digest::of(&checksums.collect::<Vec<_>>())
            };
            let images = images.into_iter().map(|slot| (slot, digest(&cells.images[slot as usize])));
            let images = images.collect();
            Some(Apart { owned, slot: Some(entry.slot), checksums: digest(&cells.state), images })
        };
        state.entries.iter_mut().enumerate().filter_map(apart).collect()
    }

    /// The versions of a shard that a record says this server has.
    pub(super) fn kept(&self, record: &Record, owned: usize) -> Option<RangeInclusive<Version>> {
        let place = &self.plan.shards[owned];
        record.versions_of(place.shard, self.server, place.opened)
    }

    /// Reserves the space of a shard that may come. Space that is reserved already stays.
    pub(in crate::tier::nvme) fn make_room(&self, owned: OwnedShard) -> Result<(), Fault> {
        let place = &self.plan.shards[owned.index()];
        let disk = &self.disks[place.file];
        if place.position.is_none() {
            return Err(without_place(disk.path().display(), place.shard));
        }
        self.lock().entries[owned.index()].released_at = None;
        let mut parts = self.plan.space(owned).into_iter();
        parts.try_for_each(|part| disk.reserve(part)).map_err(io("reserve space", disk.path()))
    }

    /// Forgets a shard that another server owns.
    pub(in crate::tier::nvme) fn release(self: &Arc<Self>, owned: OwnedShard) {
        let freed = self.until(|state| {
            let version = state.version;
            let entry = &mut state.entries[owned.index()];
            if matches!(entry.holding, Holding::Reading | Holding::Writing | Holding::Busy) {
                return false;
            }
            (entry.blank, entry.tabled, entry.fetched_images) = (true, false, 0);
            entry.released_at = Some(version);
            if !self.resident[owned.index()]
                && let Holding::Ready(held) = mem::replace(&mut entry.holding, Holding::Disk)
            {
                state.free.push(held.region);
            }
            true
        });
        if let Err(fault) = freed {
            tracing::debug!(%fault, "a shard that was handed over is not freed");
        }
        self.changed.notify_all();
    }

    /// Gives the space of released shards back, once no record names them. The record of `version` is durable.
    pub(in crate::tier::nvme) fn give_back_released(&self, version: Version) {
        // The lock keeps a shard that comes back from being written meanwhile.
        let mut state = self.lock();
        for (owned, entry) in state.entries.iter_mut().enumerate() {
            let is_over = |at: &mut Version| at.0 + NAMED_BY <= version.0;
            if entry.released_at.take_if(is_over).is_none() || !entry.blank {
                continue;
            }
            let disk = &self.disks[self.plan.shards[owned].file];
            let mut parts = self.plan.space(OwnedShard(owned)).into_iter();
            if let Err(error) = parts.try_for_each(|part| disk.give_back(part)) {
                tracing::debug!(%error, "space of a shard that was handed over stays");
            }
        }
    }
}
