//! Records of decided versions in a tmpfs, and notes on their standing since.

use std::{
    path::Path,
    sync::atomic::{AtomicU64, Ordering, fence},
};

use longshore_proto::{Fault, Step, Version};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::{SHARD_WORDS, SUMMED, ShmTier, UNDO_SLOTS, UNDO_WORDS, open::Sizes};
use crate::{
    ids::OwnedShard,
    lock,
    record::{KeptShard, Record, Standing, is_handed},
    threads::ThreadPool,
    tier::{
        contract::Interrupted,
        fault::{corrupt, internal},
        folder::Header,
        record::{Found, MAGIC_BYTES, RECORD_BYTES, decode, encode},
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
    #[serde(default)]
    standing: Option<Standing>,
}

/// First byte of a version's area.
fn start_of(version: Version) -> usize {
    (version.0 % 2) as usize * RECORD_BYTES
}

fn note_at(place: usize) -> usize {
    RECORD_BYTES - (NOTES - place) * NOTE_BYTES
}

/// Returns the newest note on a version.
///
/// # Errors
/// The reason why a note is damaged.
fn newest_note(area: &[u8], version: Version) -> Result<Option<Note>, String> {
    let mut newest = None::<Note>;
    for place in 0..NOTES {
        match read_frame::<Note>(&area[note_at(place)..][..NOTE_BYTES]) {
            Found::Valid(note) if note.version == version => {
                newest = newest.into_iter().chain([note]).max_by_key(|note| note.number);
            }
            // A note of another version does not count.
            Found::Valid(_) | Found::Blank => {}
            Found::Broken(why) => return Err(why),
            Found::Refused(fault) => return Err(fault.to_string()),
        }
    }
    Ok(newest)
}

/// Writes a frame over another one. The magic is cleared first and set last, so a process that dies meanwhile leaves no
/// frame. A frame with magic and a wrong checksum is damaged.
fn write_frame(area: &mut [u8], frame: &[u8]) {
    let (magic, rest) = area[..frame.len()].split_at_mut(MAGIC_BYTES);
    magic.fill(0);
    fence(Ordering::SeqCst);
    rest.copy_from_slice(&frame[MAGIC_BYTES..]);
    fence(Ordering::SeqCst);
    magic.copy_from_slice(&frame[..MAGIC_BYTES]);
}

pub(super) fn read_frame<T: DeserializeOwned>(area: &[u8]) -> Found<T> {
    if area[..MAGIC_BYTES].iter().all(|&byte| byte == 0) { Found::Blank } else { decode(area) }
}

impl ShmTier {
    pub(super) fn write_record(&self, record: &Record) -> Result<(), Fault> {
        self.write_record_at(record, record.version)
    }

    /// Writes a record to the place of a version, with its standing. Old notes are cleared: a version may be decided
    /// again.
    pub(super) fn write_record_at(&self, record: &Record, place: Version) -> Result<(), Fault> {
        let frame = encode(record).map_err(|why| internal(why, "encodable"))?;
        if frame.len() > RECORD_BYTES - NOTES * NOTE_BYTES {
            return Err(internal(format!("{} bytes of record", frame.len()), "in its place"));
        }
        let mut records = lock(&self.records);
        let area = &mut records.bytes_mut()[start_of(place)..][..RECORD_BYTES];
        // The record is cleared before its notes. A kill between two notes could otherwise leave the older one, which
        // would count.
        area[..MAGIC_BYTES].fill(0);
        fence(Ordering::SeqCst);
        (0..NOTES).for_each(|place| area[note_at(place)..][..MAGIC_BYTES].fill(0));
        write_frame(area, &frame);
        Ok(())
    }

    pub(super) fn write_note(&self, record: &Record) -> Result<(), Fault> {
        let mut records = lock(&self.records);
        let area = &mut records.bytes_mut()[start_of(record.version)..][..RECORD_BYTES];
        let newest = newest_note(area, record.version).map_err(|why| self.damaged(&why))?;
        let number = newest.map_or(0, |note| note.number + 1);
        let note = Note { version: record.version, number, standing: record.standing.clone() };
        let frame = encode(&note).map_err(|why| internal(why, "encodable"))?;
        if frame.len() > NOTE_BYTES {
            return Err(internal(format!("{} bytes of note", frame.len()), "in its place"));
        }
        let place = note_at((number % NOTES as u64) as usize);
        write_frame(&mut area[place..], &frame);
        Ok(())
    }

    /// Restores the blocks that were being changed, and compares all blocks with their checksums. Returns None if the
    /// job was never loaded to the end.
    ///
    /// # Errors
    /// If anything is damaged, or written by a newer version of this program. Nothing is changed then.
    pub(super) fn recover(
        &mut self,
        sizes: &Sizes,
        header: &Header,
        pool: &ThreadPool,
    ) -> Result<Option<Interrupted>, Fault> {
        let mut records: Vec<Record> = Vec::new();
        let areas = lock(&self.records);
        for area in areas.bytes().chunks(RECORD_BYTES) {
            match read_frame::<Record>(area) {
                Found::Valid(record) => {
                    // A change of the placement writes the record to both areas. Notes lie only in the area of the
                    // version's parity.
                    let noted = &areas.bytes()[start_of(record.version)..][..RECORD_BYTES];
                    let note = newest_note(noted, record.version).map_err(|why| self.damaged(&why))?;
                    let standing = note.map_or_else(|| record.standing.clone(), |note| note.standing);
                    records.push(Record { standing, ..record });
                }
                Found::Refused(fault) => return Err(fault),
                Found::Broken(why) => return Err(self.damaged(&why)),
                Found::Blank => {}
            }
        }
        drop(areas);
        let epoch = |record: &Record| record.placement.as_ref().map(|placement| placement.epoch);
        records.sort_by_key(|record| (record.version, epoch(record)));
        // Both places have the version's record after a change of the placement between two steps.
        if let [before, newest] = &records[..]
            && before.version == newest.version
        {
            records.remove(0);
        }
        let words: Vec<u64> = self.words.get().iter().map(|word| word.load(Ordering::Acquire)).collect();
        if records.is_empty() {
            return match self.shards().any(|owned| self.shard(owned)[SUMMED..].iter().any(is_set)) {
                true => Err(self.damaged("it has no record, and steps were summed")),
                false => Ok(None),
            };
        }
        let shards = kept(&words, sizes, header, &records).map_err(|why| self.damaged(&why))?;
        self.undo_blocks()?;
        self.check_blocks(&shards, pool)?;
        Ok(Some(Interrupted { shards, records }))
    }

    fn damaged(&self, why: &str) -> Fault {
        damaged(&self.folder.path.join("progress"), why)
    }
}

fn is_set(word: &AtomicU64) -> bool {
    word.load(Ordering::Acquire) != 0
}

/// Returns the fault of a file that differs from the written one.
pub(super) fn damaged(path: &Path, why: &str) -> Fault {
    let remedy = "nothing was deleted: put the file back; or give the state up with `longshore delete --job NAME \
                  --discard-unreadable`, and go back to a checkpoint with --resume";
    corrupt(format!("{} ({why})", path.display()), "as it was written", remedy)
}

/// Returns the shards that are here or on their way, by place. `records` are oldest first.
///
/// # Errors
/// The first word with a value that no killed server can have left.
pub(super) fn kept(
    words: &[u64],
    sizes: &Sizes,
    header: &Header,
    records: &[Record],
) -> Result<Vec<Option<KeptShard>>, String> {
    let Some(newest) = records.last() else { return Ok(Vec::new()) };
    let placement = newest.placement.as_ref().unwrap_or(&header.placement);
    let shards = sizes.owned.len();
    let blocks = sizes.blocks[shards];
    let (of_shards, rest) = words.split_at(shards * SHARD_WORDS);
    let (of_blocks, rest) = rest.split_at(blocks);
    let mut found = Vec::with_capacity(shards);
    for (owned, words) in OwnedShard::all(shards).zip(of_shards.as_chunks::<SHARD_WORDS>().0) {
        let (shard, &[begun, done, oldest, even, odd]) = (sizes.owned[owned.index()], words);
        let span = placement.span(header.server, shard);
        if span.is_empty() || is_handed(&span, newest.version, header.spec.max_delay) {
            found.push(None);
            continue;
        }
        let fetched = span.start.saturating_sub(1);
        let awaited = done < fetched;
        found.push(Some(KeptShard {
            version: Version(done.max(fetched)),
            awaited,
            older_image: begun == done && done > oldest,
            summed: [Step(even), Step(odd)],
        }));
        let last = newest.version.0.min(span.end - 1);
        let most = last.max(fetched);
        if !awaited && (begun < done || begun > done + 1 || begun > most) {
            return Err(format!("{shard} of it is at version {done} and began {begun}, of {most} decided"));
        }
        // Missing updates are made from the records, so each must have its record.
        let mut missing = (done.max(fetched) + 1..=last).take(records.len() + 1);
        let is_gone = |version: &u64| records.iter().all(|record| record.version.0 != *version);
        if let Some(missing) = missing.find(is_gone) {
            return Err(format!("{shard} of it is at version {done}, and the record of {missing} is gone"));
        }
        let mut range = sizes.blocks[owned.index()]..sizes.blocks[owned.next().index()];
        if let Some(block) = range.find(|&block| !awaited && of_blocks[block] > begun) {
            let version = of_blocks[block];
            return Err(format!("block {block} of it is at version {version}, before its shard began it"));
        }
    }
    let slots = rest.chunks_exact(UNDO_WORDS).take(UNDO_SLOTS).enumerate();
    let held = slots.map(|(slot, words)| (slot, words[0])).find(|(_, held)| *held > blocks as u64);
    match held {
        Some((slot, held)) => Err(format!("the copy in slot {slot} is of block {}, of {blocks}", held - 1)),
        None => Ok(found),
    }
}
