//! Record of the joined processes, beside the state: a replaced process stays fenced after a restart. Joins write it on
//! their calls' threads.

use std::{
    path::Path,
    sync::{Arc, Mutex},
};

use longshore_proto::{Fault, Incarnation, Version};
use serde::{Deserialize, Serialize};

use super::{
    super::{
        fault::{corrupt, internal, io},
        record::{Found, SECTOR, decode, encode},
    },
    durable::{get, with_buffer},
};
use crate::{
    io::{Direction, Disk, OpenDisk, Part, flush, transfer},
    lock,
    memory::{AllocationError, Region, Slab},
    record::Joined,
};

/// Number of tables in the file. Writes take turns between them, so that a torn write leaves the table before whole.
/// Each table has two copies against damaged sectors.
const PARITIES: u64 = 2;
const COPIES: u64 = 2;
/// Largest number of bytes that a rank's numbers take as JSON.
const RANK_BYTES: usize = 56;

/// The file `ranks` of a store's first folder, written when a rank joins:
///
/// ```text
/// [parity 0: copy, copy] [parity 1: copy, copy]     framed as records are (tier/record.rs)
/// ```
pub(super) struct Ranks {
    disk: Arc<dyn Disk>,
    store: u64,
    area: usize,
    buffer: Mutex<Option<Region>>,
    table: Mutex<Table>,
    /// Lock of the writer. A caller that waited finds its own rank written with the others.
    writing: Mutex<()>,
}

struct Table {
    ranks: Vec<Option<Joined>>,
    /// Number of changes of `ranks`, and the number of them that are kept.
    changes: u64,
    kept: u64,
    /// The generation of the last table written.
    generation: u64,
}

#[derive(Serialize, Deserialize)]
struct StoredRanks {
    store: u64,
    /// Number of the table, which rises with each write.
    generation: u64,
    /// The incarnation, the version at its join, and true if the process has only fenced.
    ranks: Vec<Option<(Incarnation, Version, bool)>>,
    /// The number of ranks that take part, if fewer than the spec's world size; else 0.
    #[serde(default, skip_serializing_if = "is_zero")]
    world_size: u32,
}

fn is_zero(number: &u32) -> bool {
    *number == 0
}

fn area(world_size: u32) -> usize {
    (256 + RANK_BYTES * world_size as usize).next_multiple_of(SECTOR)
}

/// Returns the bytes that the file takes of DRAM and of the drive.
pub(super) fn need(world_size: u32) -> (u64, u64) {
    let area = area(world_size) as u64;
    (area, area * PARITIES * COPIES)
}

pub(super) fn create(opener: &dyn OpenDisk, path: &Path, world_size: u32) -> Result<(), Fault> {
    let disk = opener.create(path).map_err(io("create", path))?;
    disk.reserve(0..need(world_size).1).map_err(io("reserve space", path))
}

impl Ranks {
    pub(super) fn open(
        disk: Arc<dyn Disk>,
        store: u64,
        world_size: u32,
        fresh: bool,
    ) -> Result<Ranks, Fault> {
        let area = area(world_size);
        let exhausted = |error: AllocationError| internal(error, "allocated");
        let buffer = Slab::allocate(Slab::bytes_for([area])).map_err(exhausted)?.carve_here(&[area]).pop();
        let ranks = vec![None; world_size as usize];
        let table = Mutex::new(Table { ranks, changes: 0, kept: 0, generation: 0 });
        let found = Ranks { disk, store, area, buffer: Mutex::new(buffer), table, writing: Mutex::new(()) };
        if !fresh {
            found.take_newest()?;
        }
        Ok(found)
    }

    fn take_newest(&self) -> Result<(), Fault> {
        let (mut newest, mut broken, mut written) = (None::<StoredRanks>, None, [false; PARITIES as usize]);
        let world_size = lock(&self.table).ranks.len();
        for index in 0..PARITIES * COPIES {
            let bytes = get(&*self.disk, &self.buffer, index * self.area as u64, self.area)?;
            let found = decode::<StoredRanks>(&bytes);
            written[(index / COPIES) as usize] |= !matches!(found, Found::Blank);
            match found {
                Found::Blank => {}
                Found::Valid(found) if found.store == self.store && found.ranks.len() == world_size => {
                    let newer = newest.as_ref().is_none_or(|known| known.generation < found.generation);
                    newest = if newer { Some(found) } else { newest };
                }
                Found::Valid(_) => broken = Some("of another store".to_string()),
                Found::Broken(why) => broken = Some(why),
                Found::Refused(fault) => return Err(fault),
            }
        }
        if let Some(StoredRanks { generation, ranks, world_size, .. }) = newest {
            let joined = |(incarnation, at, fence_only)| Joined { incarnation, at, fence_only, world_size };
            let ranks = ranks.into_iter().map(|rank| rank.map(joined)).collect();
            *lock(&self.table) = Table { ranks, changes: 0, kept: 0, generation };
            return Ok(());
        }
        match broken {
            // If only one parity was written, the broken table was the first, torn during its write. No rank was told
            // that it had joined.
            Some(why) if written.iter().all(|&written| written) => {
                let value = format!("{} ({why})", self.disk.path().display());
                let remedy =
                    "stop every worker of the job and remove this file: who had joined is not known then";
                Err(corrupt(value, "whole, or its copies", remedy))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn all(&self) -> Vec<Option<Joined>> {
        lock(&self.table).ranks.clone()
    }

    pub(super) fn joined(&self, rank: usize, joined: Joined) {
        let mut table = lock(&self.table);
        table.ranks[rank] = Some(joined);
        table.changes += 1;
    }

    /// Returns once all joined processes are kept, with the bytes written for it.
    pub(super) fn keep(&self) -> Result<u64, Fault> {
        let _writing = lock(&self.writing);
        let (changes, stored) = {
            let table = lock(&self.table);
            if table.kept == table.changes {
                return Ok(0);
            }
            let joined = |rank: Joined| (rank.incarnation, rank.at, rank.fence_only);
            let ranks = table.ranks.iter().map(|rank| rank.map(joined)).collect();
            let world_size = table.ranks.first().copied().flatten().map_or(0, |zero| zero.world_size);
            let (store, generation) = (self.store, table.generation + 1);
            (table.changes, StoredRanks { store, generation, ranks, world_size })
        };
        let frame = encode(&stored).map_err(|why| internal(why, "encodable"))?;
        let written = self.write(stored.generation, &frame).map_err(io("write", self.disk.path()))?;
        let mut table = lock(&self.table);
        (table.kept, table.generation) = (changes, stored.generation);
        Ok(written)
    }

    fn write(&self, generation: u64, frame: &[u8]) -> std::io::Result<u64> {
        let first = generation % PARITIES * COPIES;
        let offsets = (first..first + COPIES).map(|index| index * self.area as u64);
        with_buffer(&self.buffer, |mut buffer| {
            buffer.bytes_mut()[..frame.len()].copy_from_slice(frame);
            let parts = offsets.map(|offset| Part { offset, range: 0..frame.len() }).collect();
            transfer(&*self.disk, Direction::Write, parts, buffer)
        })?;
        flush(&self.disk)?;
        Ok(COPIES * frame.len() as u64)
    }
}
