//! Records of decided versions in a tmpfs, and notes on their standing since.

use std::{fs::File, os::unix::fs::FileExt, path::Path, sync::atomic::Ordering};

use longshore_proto::{Fault, Step, Version};
use serde::{Deserialize, Serialize};

use super::ShmTier;
use crate::{
    ids::OwnedShard,
    lock,
    record::{Record, Standing, exact},
    tier::{
        contract::{Interrupted, KeptShard},
        fault::{internal, io},
        record::{Found, RECORD_BYTES, RecordJson, decode, encode},
    },
};

/// Bytes of one note on a version's standing. Each record's area ends with two notes, and at any instant one
/// of them is complete.
const NOTE_BYTES: usize = 32 * 1024;
const NOTES: usize = 2;

/// Standing of a version since its record was written. The note before stays whole while the next is written.
#[derive(Serialize, Deserialize)]
struct Note {
    version: Version,
    number: u64,
    #[serde(default, with = "exact::standing")]
    standing: Option<Standing>,
}

/// Returns a note's offset from the start of a record's area.
fn note_at(place: usize) -> usize {
    RECORD_BYTES - (NOTES - place) * NOTE_BYTES
}

fn newest_note(area: &[u8], version: Version) -> Option<Note> {
    let notes = (0..NOTES).filter_map(|place| match decode::<Note>(&area[note_at(place)..][..NOTE_BYTES]) {
        Found::Valid(note) if note.version == version => Some(note),
        // The note is torn or belongs to another version: nobody was told of it.
        _ => None,
    });
    notes.max_by_key(|note| note.number)
}

impl ShmTier {
    pub(super) fn write_record(&self, record: &Record) -> Result<(), Fault> {
        let frame = encode(&RecordJson::from(record)).map_err(|why| internal(why, "encodable"))?;
        if frame.len() > RECORD_BYTES - NOTES * NOTE_BYTES {
            return Err(internal(format!("{} bytes of record", frame.len()), "in its place"));
        }
        let start = (record.version.0 % 2) as usize * RECORD_BYTES;
        lock(&self.records).bytes_mut()[start..start + frame.len()].copy_from_slice(&frame);
        Ok(())
    }

    /// Keeps the standing of a version since its record was written.
    pub(super) fn write_note(&self, record: &Record) -> Result<(), Fault> {
        let start = (record.version.0 % 2) as usize * RECORD_BYTES;
        let mut records = lock(&self.records);
        let area = &mut records.bytes_mut()[start..start + RECORD_BYTES];
        let number = newest_note(area, record.version).map_or(0, |note| note.number + 1);
        let note = Note { version: record.version, number, standing: record.standing.clone() };
        let frame = encode(&note).map_err(|why| internal(why, "encodable"))?;
        if frame.len() > NOTE_BYTES {
            return Err(internal(format!("{} bytes of note", frame.len()), "in its place"));
        }
        let place = note_at((number % NOTES as u64) as usize);
        area[place..place + frame.len()].copy_from_slice(&frame);
        Ok(())
    }

    /// Restores the blocks that were being changed. Returns None if the job was never loaded to the end.
    pub(super) fn recover(&mut self) -> Result<Option<Interrupted>, Fault> {
        let mut records: Vec<Record> = Vec::new();
        for area in lock(&self.records).bytes().chunks(RECORD_BYTES) {
            // The process died while it wrote a broken record, and nobody was told of it.
            match decode::<RecordJson>(area) {
                Found::Valid(json) => {
                    let record = Record::from(json);
                    let standing = newest_note(area, record.version).and_then(|note| note.standing);
                    records.push(Record { standing, ..record });
                }
                Found::Retired(fault) => return Err(fault),
                Found::Blank | Found::Broken(_) => {}
            }
        }
        records.sort_by_key(|record| record.version);
        if records.is_empty() {
            return Ok(None);
        }
        self.undo_blocks()?;
        let shard = |owned: OwnedShard| {
            let [begun, done, oldest, even, odd] =
                [0, 1, 2, 3, 4].map(|word| self.shard(owned)[word].load(Ordering::Acquire));
            let summed = [Step(even), Step(odd)];
            KeptShard { version: Version(done), older_image: begun == done && done > oldest, summed }
        };
        Ok(Some(Interrupted { shards: self.shards().map(shard).collect(), records }))
    }
}

/// Returns the records of a `progress` file: the whole ones, and why others are broken.
pub(in crate::tier) fn records_of(file: &File, path: &Path) -> Result<Vec<Result<Record, String>>, Fault> {
    let mut area = vec![0; RECORD_BYTES];
    let mut records = Vec::new();
    for parity in 0..2 {
        file.read_exact_at(&mut area, parity * RECORD_BYTES as u64).map_err(io("read", path))?;
        match decode::<RecordJson>(&area) {
            Found::Blank => {}
            Found::Valid(json) => records.push(Ok(json.into())),
            Found::Broken(why) => records.push(Err(why)),
            Found::Retired(fault) => return Err(fault),
        }
    }
    Ok(records)
}
