//! Recovery of a store: its records, the newest permitted version, and that version's tables.

use std::{collections::BTreeMap, sync::Mutex};

use longshore_proto::{Fault, FaultKind, Version};

use super::{
    super::{
        fault::{FIELD, corrupt},
        record::{Found, SECTOR, crc64, decode, frame_len},
    },
    durable::{StoredRecord, get},
    plan::{Apart, ApartChecksums, Digest, FilePlan, RECORD_COPIES, StorePlan},
};
use crate::{ids::OwnedShard, io::Disk, memory::Region};

/// All records of a store, with the faults of the damaged ones.
#[derive(Default)]
pub(super) struct Records {
    /// The record of the latest process, for each version.
    pub(super) valid: BTreeMap<Version, StoredRecord>,
    /// Places of the damaged records, and why each is damaged.
    pub(super) broken: Vec<String>,
    pub(super) copies: usize,
}

impl Records {
    pub(super) fn read(
        plan: &StorePlan,
        disks: &[&dyn Disk],
        meta: &[&Mutex<Option<Region>>],
        store: u64,
    ) -> Result<Records, Fault> {
        let mut records = Records::default();
        for (file, &disk) in disks.iter().enumerate() {
            for parity in 0..2 {
                for copy in 0..RECORD_COPIES {
                    let offset = FilePlan::record_at(parity, copy);
                    let found = read_record(disk, meta[file], offset)?;
                    let place = format!("{}, record {parity}, copy {copy}", disk.path().display());
                    records.add(plan, store, parity as u64, place, found)?;
                }
            }
        }
        Ok(records)
    }

    fn add(
        &mut self,
        plan: &StorePlan,
        store: u64,
        parity: u64,
        place: String,
        found: Found<StoredRecord>,
    ) -> Result<(), Fault> {
        match found {
            Found::Blank => {}
            Found::Refused(fault) => return Err(fault),
            Found::Broken(why) => self.broken.push(format!("{place}: {why}")),
            Found::Valid(record) => {
                let version = record.record.version;
                let fits = record.store == store
                    && version.0 % 2 == parity
                    && record.roots.len() == plan.files.len();
                if !fits {
                    self.broken.push(format!("{place}: of another store or place"));
                    return Ok(());
                }
                self.copies += 1;
                let newer = self.valid.get(&version).is_none_or(|known| known.epoch < record.epoch);
                if newer {
                    self.valid.insert(version, record);
                }
            }
        }
        Ok(())
    }

    /// Returns the newest permitted record. None if no version was ever durable.
    pub(super) fn choose(&self, at_most: Option<Version>) -> Result<Option<&StoredRecord>, Fault> {
        let newest = self.valid.iter().rfind(|(version, _)| at_most.is_none_or(|most| **version <= most));
        if let Some((_, record)) = newest {
            for broken in &self.broken {
                tracing::warn!(broken, taken = record.record.version.0, "a damaged record is replaced");
            }
            return Ok(Some(record));
        }
        if let (Some(oldest), Some(most)) = (self.valid.keys().next(), at_most) {
            let limit = format!("at least {}, the oldest version kept here", oldest.0);
            let remedy = "restore a checkpoint: the servers have no version in common";
            return Err(Fault::new(FaultKind::NotFound, "version", most.0, limit, remedy));
        }
        match self.broken.first() {
            None => Ok(None),
            Some(broken) => {
                let remedy = "restore a checkpoint; no version of this folder can be served";
                Err(corrupt(broken, "whole, or its copies", remedy))
            }
        }
    }
}

fn read_record(
    disk: &dyn Disk,
    meta: &Mutex<Option<Region>>,
    offset: u64,
) -> Result<Found<StoredRecord>, Fault> {
    let head = get(disk, meta, offset, SECTOR)?;
    match frame_len(&head) {
        Some(length) if length > SECTOR => Ok(decode(&get(disk, meta, offset, length)?)),
        _ => Ok(decode(&head)),
    }
}

/// The block checksums of one file's slot, verified by the table's own checksum in the record.
pub(super) fn read_table(
    disk: &dyn Disk,
    meta: &Mutex<Option<Region>>,
    plan: &FilePlan,
    (offset, root): (u64, u64),
    what: impl std::fmt::Display,
) -> Result<Vec<u64>, Fault> {
    let bytes = if plan.blocks == 0 { Vec::new() } else { get(disk, meta, offset, plan.blocks * 8)? };
    let found = crc64([&*bytes]);
    if found != root {
        let value = format!("{} (checksum table of {what}: CRC-64 {found:016x})", disk.path().display());
        return Err(corrupt(value, format!("of CRC-64 {root:016x}, as it was written"), ""));
    }
    let words = bytes.chunks_exact(8).map(|word| {
        let mut checksum = [0; 8];
        checksum.copy_from_slice(word);
        u64::from_le_bytes(checksum)
    });
    Ok(words.collect())
}

/// Reads single blocks of one file, and computes their checksums.
#[derive(Clone, Copy)]
pub(super) struct Blocks<'a> {
    pub(super) plan: &'a StorePlan,
    pub(super) disk: &'a dyn Disk,
    pub(super) meta: &'a Mutex<Option<Region>>,
}

impl Blocks<'_> {
    pub(super) fn state(&self, owned: OwnedShard, slot: u8, block: usize) -> Result<u64, Fault> {
        Ok(crc64([&*self.state_bytes(owned, slot, block)?]))
    }

    /// Returns a block of all arrays, one after the other.
    pub(super) fn state_bytes(&self, owned: OwnedShard, slot: u8, block: usize) -> Result<Vec<u8>, Fault> {
        let part = self.plan.state_part(owned, slot);
        let (shape, mut array_at) = (self.plan.shards[owned.index()].shape, part.offset);
        let mut found = Vec::new();
        for (bytes, array) in
            shape.block().into_iter().zip(shape.arrays(self.plan.shards[owned.index()].elements))
        {
            let at = array_at + (block * bytes) as u64;
            // Blocks of 8-bit moments do not start on sectors.
            let before = (at % SECTOR as u64) as usize;
            let sectors = get(self.disk, self.meta, at - before as u64, before + bytes)?;
            found.extend_from_slice(&sectors[before..]);
            array_at += array as u64;
        }
        Ok(found)
    }

    /// Returns the checksum of a block of an image. None for a frozen shard, which has no image.
    pub(super) fn image(&self, owned: OwnedShard, slot: u8, block: usize) -> Result<Option<u64>, Fault> {
        if self.plan.shards[owned.index()].frozen {
            return Ok(None);
        }
        let bytes = self.plan.image_block;
        let part = self.plan.image_part(owned, slot);
        Ok(Some(crc64([&*get(self.disk, self.meta, part.offset + (block * bytes) as u64, bytes)?])))
    }

    /// Returns the checksums of a shard that lies apart, verified by its digests. None if another server has the shard.
    pub(super) fn apart(&self, owned: OwnedShard, apart: &Apart) -> Result<Option<ApartChecksums>, Fault> {
        let Some(slot) = apart.slot else { return Ok(None) };
        let place = &self.plan.shards[owned.index()];
        let check = |what: &str, checksums: Vec<u64>, written: Digest| {
            let found = Digest::of(&checksums);
            if found == written {
                return Ok(checksums);
            }
            let value = format!("{} ({what} of {}: {found})", self.disk.path().display(), place.shard);
            Err(corrupt(value, format!("of {written}, as it was written"), ""))
        };
        let blocks = 0..place.blocks();
        let state = blocks.clone().map(|block| self.state(owned, slot, block)).collect::<Result<_, _>>()?;
        let state = check(&format!("slot {slot}"), state, apart.checksums)?;
        let image = |&(slot, written): &(u8, Digest)| {
            let read = |block| Ok(self.image(owned, slot, block)?.unwrap_or_default());
            let checksums = blocks.clone().map(read).collect::<Result<_, Fault>>()?;
            Ok((slot, check(&format!("image slot {slot}"), checksums, written)?))
        };
        let images = apart.images.iter().map(image).collect::<Result<_, Fault>>()?;
        Ok(Some(ApartChecksums { state, images }))
    }
}

/// Returns an operator's remedy when a version turns out to be damaged, and the bytes of the one before were not read.
pub(super) fn unread_remedy(previous: Option<Version>) -> String {
    let Some(version) = previous else { return remedy(None) };
    format!(
        "`longshore step-back --version {}` goes to the version before where that one is whole; else restore a checkpoint",
        version.0
    )
}

/// Returns an operator's remedy when a version turns out to be damaged. All bytes of the version before are whole.
pub(super) fn remedy(previous: Option<Version>) -> String {
    match previous {
        Some(version) => format!(
            "{version} is whole in the other slots: `longshore step-back --version {}`, or restore a checkpoint",
            version.0
        ),
        None => "no earlier version is whole here: `longshore delete --job NAME --discard-unreadable`, then restore a checkpoint"
            .to_string(),
    }
}

pub(super) fn damaged(
    path: &std::path::Path,
    what: impl std::fmt::Display,
    found: u64,
    expected: u64,
    remedy: String,
) -> Fault {
    let value = format!("{} ({what}: CRC-64 {found:016x})", path.display());
    Fault::new(
        FaultKind::Corrupt,
        FIELD,
        value,
        format!("of CRC-64 {expected:016x}, as it was written"),
        remedy,
    )
}
