//! The version writer, which makes a version durable: tables, flush, records, flush. A thread of its own runs it, and
//! updates go on meanwhile.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    thread::{self, JoinHandle},
};

use longshore_proto::{Fault, Version};
use serde::{Deserialize, Serialize};

use super::{
    super::{
        fault::{internal, io},
        folder::Watch,
        record::{FORMAT, MOVED, SECTOR, crc64, encode_as},
    },
    pager::{BlockChecksums, ShardPager},
    plan::{Apart, FilePlan, IMAGE_SLOTS, RECORD_COPIES, STATE_SLOTS, Slots},
};
use crate::{
    io::{Direction, Disk, Part, flush, transfer},
    lock,
    memory::Region,
    record::Record,
};

/// Fields of a record beside the version: its store, the version's slots, and the checksums of its tables.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct StoredRecord {
    pub(super) store: u64,
    /// Number of the opening of the store. If two records have one version, the later opening's record counts.
    pub(super) epoch: u64,
    pub(super) slots: Slots,
    /// Checksums of the version's tables, by file.
    pub(super) roots: Vec<Roots>,
    pub(super) record: Record,
    /// Shards that no table of the version covers, since this server has fetched them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) apart: Vec<Apart>,
}

/// The CRC-64 of the checksum tables of the slots that hold the version.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Roots {
    pub(super) state: u64,
    pub(super) image: u64,
    pub(super) older_image: u64,
}

/// The CRC-64 of each table as it lies in a file, by slot.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Tables {
    pub(super) state: [u64; STATE_SLOTS as usize],
    pub(super) image: [u64; IMAGE_SLOTS as usize],
}

pub(super) struct VersionWriter {
    pub(super) pager: Arc<ShardPager>,
    /// Checksums of the tables as written, by file.
    pub(super) tables: Mutex<Vec<Tables>>,
    pub(super) store: u64,
    pub(super) epoch: Mutex<u64>,
    /// A buffer for one table or record, by file.
    pub(super) meta: Vec<Mutex<Option<Region>>>,
    pub(super) watch: Watch,
}

type Queue = mpsc::Sender<(Record, Slots)>;

/// The writer's thread with its queue. None once the thread has ended.
pub(super) struct WriterThread(Mutex<Option<(Queue, JoinHandle<()>)>>);

impl WriterThread {
    pub(super) fn start(writer: Arc<VersionWriter>) -> std::io::Result<WriterThread> {
        let (queue, inbox) = mpsc::channel::<(Record, Slots)>();
        let work = move || {
            while let Ok((record, slots)) = inbox.recv() {
                if writer.make_durable(&record, slots, false).is_err() {
                    return;
                }
            }
        };
        let thread = thread::Builder::new().name("nvme-writer".to_string()).spawn(work)?;
        Ok(WriterThread(Mutex::new(Some((queue, thread)))))
    }

    pub(super) fn send(&self, record: Record, slots: Slots) {
        if let Some((queue, _)) = &*lock(&self.0) {
            // The thread ends early only if the store has failed, and every later call reports that.
            let _ = queue.send((record, slots));
        }
    }

    /// Ends the thread once the versions in its queue are durable, or the store has failed.
    pub(super) fn end(&self) {
        let ending = lock(&self.0).take();
        if let Some((queue, thread)) = ending {
            drop(queue);
            let _ = thread.join();
        }
    }
}

impl Drop for WriterThread {
    fn drop(&mut self) {
        self.end();
    }
}

impl VersionWriter {
    /// Makes a version durable once the writes of its shards are done. An error fails the store. The `first` version
    /// also writes the table of its older image, which no version before has written. A skipped step changes no table,
    /// since its version has the slots of the version before.
    pub(super) fn make_durable(&self, record: &Record, slots: Slots, first: bool) -> Result<(), Fault> {
        let skipped = !first && record.is_skipped();
        // A skipped step writes no state, except for shards that were fetched for it.
        let written = self.pager.write_fetched(record, slots).and_then(|fetched| {
            self.pager.wait_for_writes()?;
            match skipped {
                false => {
                    self.each_file(|file| self.write_tables(file, slots, first))?;
                    self.pager.tabled(record, slots, first);
                }
                true if fetched => self.each_file(|file| self.flush(file))?,
                true => {}
            }
            self.publish(record, slots, false)
        });
        written.map_err(|fault| {
            tracing::error!(%fault, version = record.version.0, "could not be made durable");
            self.pager.fail(fault)
        })
    }

    /// Makes another placement of the durable version durable. The record names shards that were fetched since as
    /// apart, so no table of the version changes. The older image's table is written if it never was.
    pub(super) fn place(&self, record: &Record, slots: Slots) -> Result<(), Fault> {
        self.pager.write_fetched(record, slots)?;
        self.pager.wait_for_writes()?;
        let older = slots.older_image.filter(|_| self.pager.plan.images);
        self.each_file(|file| {
            if let Some(slot) = older.filter(|&slot| lock(&self.tables)[file].image[slot as usize] == 0) {
                self.write_image_table(file, slot)?;
            }
            self.flush(file)
        })?;
        self.publish(record, slots, true)
    }

    /// Writes the record of a version whose slots and tables are written and flushed. With `again` the record
    /// overwrites itself, one copy after the other, so that at any instant one is whole.
    pub(super) fn publish(&self, record: &Record, slots: Slots, again: bool) -> Result<(), Fault> {
        let roots = (0..self.pager.disks.len()).map(|file| self.roots(file, slots)).collect();
        let stored = StoredRecord {
            store: self.store,
            epoch: *lock(&self.epoch),
            slots,
            roots,
            record: record.clone(),
            apart: self.pager.apart(record, slots),
        };
        let format = if record.placement.is_some() { MOVED } else { FORMAT };
        let frame = encode_as(format, &stored).map_err(|why| internal(why, "encodable"))?;
        let parity = (record.version.0 % 2) as usize;
        let copies = if again { 1 } else { RECORD_COPIES };
        self.each_file(|file| self.write_records(file, parity, &frame, copies))?;
        self.watch.check()?;
        self.pager.lock().durable = Some(record.version);
        self.pager.give_back_released(record.version);
        self.pager.tell();
        Ok(())
    }

    /// Erases a version's records, so that it counts as never made.
    pub(super) fn erase(&self, version: Version) -> Result<(), Fault> {
        let parity = (version.0 % 2) as usize;
        self.each_file(|file| self.write_records(file, parity, &[0; SECTOR], RECORD_COPIES))
    }

    /// Runs `work` on all files at once, since each has a device of its own to flush.
    fn each_file(&self, work: impl Fn(usize) -> Result<(), Fault> + Sync) -> Result<(), Fault> {
        let work = &work;
        thread::scope(|scope| {
            let others: Vec<_> =
                (1..self.pager.disks.len()).map(|file| scope.spawn(move || work(file))).collect();
            let first = work(0);
            let joined = others.into_iter().map(|thread| {
                thread.join().unwrap_or_else(|_| Err(internal("a panic while writing", "no panic")))
            });
            joined.fold(first, Result::and)
        })
    }

    fn write_tables(&self, file: usize, slots: Slots, first: bool) -> Result<(), Fault> {
        let plan = &self.pager.plan.files[file];
        let table = self.table(file, |checksums| &checksums.state);
        self.put(file, &[plan.state_table_at(slots.state)], &table)?;
        lock(&self.tables)[file].state[slots.state as usize] = crc64([&*table]);
        if self.pager.plan.images {
            let older = slots.older_image.filter(|_| first);
            for slot in [Some(slots.image), older].into_iter().flatten() {
                self.write_image_table(file, slot)?;
            }
        }
        self.flush(file)
    }

    fn write_image_table(&self, file: usize, slot: u8) -> Result<(), Fault> {
        let table = self.table(file, |checksums| &checksums.images[slot as usize]);
        self.put(file, &[self.pager.plan.files[file].image_table_at(slot)], &table)?;
        lock(&self.tables)[file].image[slot as usize] = crc64([&*table]);
        Ok(())
    }

    /// Writes the record's copies, and flushes after every `at_once` of them.
    fn write_records(&self, file: usize, parity: usize, frame: &[u8], at_once: usize) -> Result<(), Fault> {
        let copies: Vec<u64> = (0..RECORD_COPIES).map(|copy| FilePlan::record_at(parity, copy)).collect();
        for copies in copies.chunks(at_once) {
            self.put(file, copies, frame)?;
            self.flush(file)?;
        }
        Ok(())
    }

    fn flush(&self, file: usize) -> Result<(), Fault> {
        let disk = &self.pager.disks[file];
        flush(disk).map_err(io("flush", disk.path()))
    }

    /// Writes bytes, padded to whole sectors, at each of the offsets.
    fn put(&self, file: usize, offsets: &[u64], bytes: &[u8]) -> Result<(), Fault> {
        let disk = &self.pager.disks[file];
        with_buffer(&self.meta[file], |mut buffer| {
            let padded = bytes.len().next_multiple_of(SECTOR);
            let target = &mut buffer.bytes_mut()[..padded];
            target[..bytes.len()].copy_from_slice(bytes);
            target[bytes.len()..].fill(0);
            let parts = offsets.iter().map(|&offset| Part { offset, range: 0..padded }).collect();
            self.pager.written.fetch_add((padded * offsets.len()) as u64, Ordering::Relaxed);
            transfer(&**disk, Direction::Write, parts, buffer)
        })
        .map_err(io("write", disk.path()))
    }

    fn table(&self, file: usize, cells: impl Fn(&BlockChecksums) -> &Vec<AtomicU64>) -> Vec<u8> {
        let owned = self.pager.plan.files[file].owned.iter();
        let checksums = owned.flat_map(|&owned| cells(&self.pager.checksums[owned.index()]));
        checksums.flat_map(|checksum| checksum.load(Ordering::Relaxed).to_le_bytes()).collect()
    }

    /// The checksums of a version's tables as written. A shard that is fetched meanwhile does not change them.
    fn roots(&self, file: usize, slots: Slots) -> Roots {
        let Tables { state, image } = lock(&self.tables)[file];
        let is_stored = self.pager.plan.images;
        let of_image = |slot: Option<u8>| slot.filter(|_| is_stored).map_or(0, |slot| image[slot as usize]);
        Roots {
            state: state[slots.state as usize],
            image: of_image(Some(slots.image)),
            older_image: of_image(slots.older_image),
        }
    }
}

/// Runs `work` with the buffer. A missing buffer means that its disk's thread is gone.
pub(super) fn with_buffer(
    meta: &Mutex<Option<Region>>,
    work: impl FnOnce(Region) -> (Option<Region>, std::io::Result<()>),
) -> std::io::Result<()> {
    let mut meta = lock(meta);
    let buffer = meta.take().ok_or_else(|| std::io::Error::other("the disk's thread has ended"))?;
    let (buffer, result) = work(buffer);
    *meta = buffer;
    result
}

pub(super) fn get(
    disk: &dyn Disk,
    meta: &Mutex<Option<Region>>,
    offset: u64,
    bytes: usize,
) -> Result<Vec<u8>, Fault> {
    let mut found = Vec::new();
    let read = with_buffer(meta, |buffer| {
        let range = 0..bytes.next_multiple_of(SECTOR);
        let (buffer, result) = transfer(disk, Direction::Read, vec![Part { offset, range }], buffer);
        if let (Some(buffer), Ok(())) = (&buffer, &result) {
            found.extend_from_slice(&buffer.bytes()[..bytes]);
        }
        (buffer, result)
    });
    read.map_err(io("read", disk.path())).map(|()| found)
}
