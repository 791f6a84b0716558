//! The `shm` tier: the memory tier's arrays in files of a tmpfs, so that they outlive the process.
//!
//! A process can be killed at any instruction, and whatever it had stored by then stays. So all that is needed is an
//! order of stores, and a copy of each block while it is being changed. The host's end is the end of a tmpfs; against that
//! there are checkpoints.

use std::{
    fs::{File, OpenOptions},
    ops::Range,
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::Path,
    sync::{
        Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use longshore_proto::{
    Fault, FaultKind, Incarnation, JobSpec, Layout, Rank, ShardId, Step, TierKind, Version,
    limits::BLOCK_ELEMENTS,
};

use serde::{Deserialize, Serialize};

use super::{
    Guard, ImageAge, Inputs, Joined, MemoryTier, Record, Shape, Standing, StateMut, StateRef, Tier, Turn,
    fault::{FIELD, SHM_FIELD, internal, io, named},
    folder::{Folder, HEADER_FILE, Header},
    record::{Found, RECORD_BYTES, RecordJson, decode, encode},
    removal::{finish_job, remove_all},
    watch::Watch,
};
use crate::{
    checkpoint::exact,
    lock,
    memory::{Region, Slab, Words},
    threads::Pool,
};

/// At the end of each record's area: two places for what was said of the version since, one whole at any instant.
const NOTE_BYTES: usize = 32 * 1024;
const NOTES: usize = 2;
const BLOCK: usize = BLOCK_ELEMENTS as usize;
/// Blocks that may be in the middle of their update: one a thread. More threads take turns.
pub(super) const UNDO_SLOTS: usize = 32;
const TMPFS_MAGIC: i64 = 0x0102_1994;
/// Words of a shard: the version begun, the version done, the oldest version an image of it was made or loaded of, and
/// by parity the step whose contributions are all summed.
pub(super) const SHARD_WORDS: usize = 5;
/// Where those steps start.
const SUMMED: usize = 3;
/// Words of an undo slot: 1 + the block (0: unused), and the version that its update makes.
pub(super) const UNDO_WORDS: usize = 2;

/// The job's arrays, and the order in which they are changed.
///
/// Files, in the job's folder, mode 0600, native byte order (a tmpfs goes nowhere else):
///
/// ```text
/// header.json  whose folder it is (tier/folder.rs)
/// state        each shard's master weights, first and second moments
/// buffers      images, contributions and sums: a decided step is updated from them after a restart; then the images'
///              words, of no use to another process
/// progress     record of version parity 0, of parity 1 (tier/record.rs), 4 MiB each, with two notes of 32 KiB on pauses at
///              their ends;
///              words of 8 bytes: 5 for each shard, 1 for each block (its version), 2 for each undo slot,
///              1 for each rank (its incarnation);
///              undo slots: one block's state each;
///              1 word for each rank (twice the version at which that incarnation joined; 1 more while it has only fenced)
/// ```
///
/// **Deciding** a step writes its record over that of two versions before, and only then is anyone told. **Updating** a
/// shard stores: the version begun; for each block a copy into an undo slot, the slot's words, the block in place, the
/// block's version, the slot's words back to 0; then the version done. **Recovery** puts back each block that an undo slot
/// holds and whose version was not reached, takes the newest whole record, and updates what is not done yet. A block whose
/// version is reached is left: its update happened once. A shard whose version begun is not done has lost its older image,
/// over which the new one was being written. A step that is summed and not decided stays summed: another server may know
/// its decision, and nobody be left who could send the gradients again.
pub struct ShmTier {
    memory: MemoryTier,
    words: Words,
    joined_at: Words,
    records: Mutex<Region>,
    /// Copies that no thread uses, with their slot.
    undo: Mutex<Vec<(usize, Region)>>,
    undo_freed: Condvar,
    /// By slot, while it is in use.
    undo_held: Vec<Mutex<Option<Region>>>,
    /// Index of each shard's first block; one more at the end.
    blocks: Vec<usize>,
    older_loaded: AtomicBool,
    /// The job's files.
    watch: Watch,
    folder: Folder,
}

/// What a recovered folder holds.
pub struct Kept {
    /// The last decided steps, oldest first: two where there were two.
    pub records: Vec<Record>,
    pub shards: Vec<KeptShard>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeptShard {
    pub version: Version,
    /// Whether the image of the version before is whole.
    pub older_image: bool,
    /// Steps whose contributions are all summed, by parity; some may be decided.
    pub summed: [Step; 2],
}

/// Sizes of the files, and of what `progress` consists of.
pub(super) struct Sizes {
    pub(super) state: usize,
    pub(super) buffers: usize,
    pub(super) progress: Vec<usize>,
    lengths: Vec<usize>,
    /// Index of each shard's first block; one more at the end.
    pub(super) blocks: Vec<usize>,
}

/// Guards the update of one shard.
struct Undo<'a> {
    tier: &'a ShmTier,
    first_block: usize,
    version: Version,
}

/// tmpfs bytes beside the state and the job's buffers.
pub fn overhead(spec: &JobSpec, layout: &Layout, owned: &[ShardId]) -> u64 {
    Slab::bytes_for(Sizes::new(spec, layout, owned, 0).progress) as u64
}

impl Sizes {
    pub(super) fn new(spec: &JobSpec, layout: &Layout, owned: &[ShardId], buffers: usize) -> Sizes {
        let lengths: Vec<usize> = owned.iter().map(|&shard| layout.shard_len(shard) as usize).collect();
        let mut blocks = vec![0];
        for length in &lengths {
            blocks.push(blocks[blocks.len() - 1] + length / BLOCK);
        }
        let shape = Shape::of(spec);
        let ranks = spec.world_size as usize;
        let words = lengths.len() * SHARD_WORDS + blocks[lengths.len()] + UNDO_SLOTS * UNDO_WORDS + ranks;
        let mut progress = vec![2 * RECORD_BYTES, words * 8];
        progress.extend(vec![shape.bytes(BLOCK); UNDO_SLOTS]);
        progress.push(ranks * 8);
        Sizes { state: MemoryTier::bytes(&lengths, shape), buffers, progress, lengths, blocks }
    }
}

impl ShmTier {
    /// Creates the job's files or finds them. Also returns the mapping for the job's other `buffers`, so many bytes. `pool`:
    /// what will update the state.
    pub fn open(
        inputs: &Inputs<'_>,
        buffers: usize,
        pool: &Pool,
    ) -> Result<(ShmTier, Slab, Option<Kept>), Fault> {
        ShmTier::open_in_folder(inputs, buffers, pool).map_err(named(SHM_FIELD))
    }

    fn open_in_folder(
        inputs: &Inputs<'_>,
        buffers: usize,
        pool: &Pool,
    ) -> Result<(ShmTier, Slab, Option<Kept>), Fault> {
        let Some(dir) = &inputs.storage.shm_dir else {
            let remedy = "start the server with --shm-dir, or open the job with the memory tier";
            return Err(Fault::new(
                FaultKind::Precondition,
                SHM_FIELD,
                "not set",
                "set for tier shm",
                remedy,
            ));
        };
        check_tmpfs(dir)?;
        let servers = inputs.placement.servers.len();
        finish_job(std::slice::from_ref(dir), &inputs.spec.name);
        let home = Folder::path(dir, &inputs.spec.name, inputs.server, servers);
        let folder = Folder::take(home.clone())?;
        let header = Header {
            store: Header::unique_store(),
            tier: TierKind::Shm,
            directory: 0,
            directories: 1,
            durable: true,
            spilled_images: false,
            server: inputs.server,
            placement: inputs.placement.clone(),
            spec: inputs.spec.clone(),
        };
        let sizes = Sizes::new(inputs.spec, inputs.layout, inputs.owned, buffers);
        if !folder.is_new()
            && let Some(found) = Header::read(&folder.path)?
        {
            found.check_same(&header, &folder.path)?;
            let (mut tier, buffers) = ShmTier::map(folder, inputs.spec, &sizes, pool, false)?;
            if let Some(kept) = tier.recover()? {
                return Ok((tier, buffers, Some(kept)));
            }
            // Never loaded to the end: nothing to go on from.
            drop((tier, buffers));
            remove_all(std::slice::from_ref(&home))?;
            return ShmTier::create(Folder::take(home)?, &sizes, &header, pool);
        }
        ShmTier::create(folder, &sizes, &header, pool)
    }

    fn create(
        folder: Folder,
        sizes: &Sizes,
        header: &Header,
        pool: &Pool,
    ) -> Result<(ShmTier, Slab, Option<Kept>), Fault> {
        folder.clear()?;
        let path = folder.path.clone();
        let made = ShmTier::map(folder, &header.spec, sizes, pool, true).and_then(|(mut tier, buffers)| {
            tier.folder.publish(header)?;
            tier.folder.settle()?;
            tier.watch = watch(&tier.folder);
            Ok((tier, buffers, None))
        });
        made.inspect_err(|_| {
            let _ = std::fs::remove_dir_all(&path);
            let _ = path.parent().map(std::fs::remove_dir);
        })
    }

    fn map(
        folder: Folder,
        spec: &JobSpec,
        sizes: &Sizes,
        pool: &Pool,
        create: bool,
    ) -> Result<(ShmTier, Slab), Fault> {
        let file = |name: &str, bytes: usize, least: usize| {
            map_file(&folder.path.join(name), bytes, if create { 0 } else { least })
        };
        let state = file("state", sizes.state, sizes.state)?;
        let buffers = file("buffers", sizes.buffers, sizes.buffers)?;
        // Earlier versions of this program did not keep when ranks had joined: it reads as version 0.
        let (_, before) = sizes.progress.split_last().expect("there are always records");
        let least = Slab::bytes_for(before.iter().copied());
        let progress = file("progress", Slab::bytes_for(sizes.progress.iter().copied()), least)?;
        let mut regions = progress.carve_here(&sizes.progress).into_iter();
        let mut next = || regions.next().expect("one region was carved for each size");
        let (records, words) = (Mutex::new(next()), Words::new(next()));
        let undo = (0..UNDO_SLOTS).map(|slot| (slot, next())).collect();
        let joined_at = Words::new(next());
        let memory = MemoryTier::over(state, &sizes.lengths, Shape::of(spec), pool)
            .map_err(|error| io("touch", &folder.path)(error.source))?;
        let tier = ShmTier {
            memory,
            words,
            joined_at,
            records,
            undo: Mutex::new(undo),
            undo_freed: Condvar::new(),
            undo_held: (0..UNDO_SLOTS).map(|_| Mutex::new(None)).collect(),
            blocks: sizes.blocks.clone(),
            older_loaded: AtomicBool::new(false),
            watch: watch(&folder),
            folder,
        };
        Ok((tier, buffers))
    }

    fn shards(&self) -> usize {
        self.blocks.len() - 1
    }

    /// A shard's words: version begun, version done, oldest image, steps summed.
    fn shard(&self, owned: usize) -> &[AtomicU64] {
        &self.words.get()[owned * SHARD_WORDS..][..SHARD_WORDS]
    }

    fn block(&self, block: usize) -> &AtomicU64 {
        &self.words.get()[self.shards() * SHARD_WORDS + block]
    }

    fn undo_words(&self, slot: usize) -> &[AtomicU64] {
        let start = self.shards() * SHARD_WORDS + self.blocks[self.shards()];
        &self.words.get()[start + slot * UNDO_WORDS..][..UNDO_WORDS]
    }

    /// The incarnation of each rank, 0 before it has joined.
    fn ranks(&self) -> &[AtomicU64] {
        &self.words.get()
            [self.shards() * SHARD_WORDS + self.blocks[self.shards()] + UNDO_SLOTS * UNDO_WORDS..]
    }

    fn write_record(&self, record: &Record) -> Result<(), Fault> {
        let frame = encode(&RecordJson::from(record)).map_err(|why| internal(why, "encodable"))?;
        if frame.len() > RECORD_BYTES - NOTES * NOTE_BYTES {
            return Err(internal(format!("{} bytes of record", frame.len()), "in its place"));
        }
        let start = (record.version.0 % 2) as usize * RECORD_BYTES;
        lock(&self.records).bytes_mut()[start..start + frame.len()].copy_from_slice(&frame);
        Ok(())
    }

    /// Puts back what was being changed. None: the job was never loaded to the end.
    fn recover(&mut self) -> Result<Option<Kept>, Fault> {
        let mut records: Vec<Record> = Vec::new();
        for area in lock(&self.records).bytes().chunks(RECORD_BYTES) {
            // A broken one was being written when the process died: nobody was told of it.
            if let Found::Valid(json) = decode::<RecordJson>(area) {
                let record = Record::from(json);
                let standing = newest_note(area, record.version).and_then(|note| note.standing);
                records.push(Record { standing, ..record });
            }
        }
        records.sort_by_key(|record| record.version);
        if records.is_empty() {
            return Ok(None);
        }
        self.undo_blocks()?;
        let shard = |owned: usize| {
            let [begun, done, oldest, even, odd] =
                [0, 1, 2, 3, 4].map(|word| self.shard(owned)[word].load(Ordering::Acquire));
            let summed = [Step(even), Step(odd)];
            KeptShard { version: Version(done), older_image: begun == done && done > oldest, summed }
        };
        Ok(Some(Kept { shards: (0..self.shards()).map(shard).collect(), records }))
    }

    fn undo_blocks(&self) -> Result<(), Fault> {
        for (slot, copy) in lock(&self.undo).iter() {
            let [held, version] = [0, 1].map(|word| self.undo_words(*slot)[word].load(Ordering::Acquire));
            let Some(block) = (held as usize).checked_sub(1) else { continue };
            if self.block(block).load(Ordering::Acquire) < version {
                let owned = self.blocks.partition_point(|&first| first <= block) - 1;
                let index = block - self.blocks[owned];
                self.memory.load(owned, &mut |state| {
                    let mut rest = copy.bytes();
                    for array in state.blocks().nth(index).map(|block| block.arrays).into_iter().flatten() {
                        let (part, after) = rest.split_at(array.len());
                        array.copy_from_slice(part);
                        rest = after;
                    }
                })?;
            }
            self.undo_words(*slot)[0].store(0, Ordering::Release);
        }
        Ok(())
    }

    fn take_undo(&self) -> (usize, Region) {
        let mut free = lock(&self.undo);
        loop {
            if let Some(slot) = free.pop() {
                return slot;
            }
            free = self.undo_freed.wait(free).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Guard for Undo<'_> {
    fn begin(&self, block: usize, state: StateRef<'_>) -> Turn {
        let block = self.first_block + block;
        if self.tier.block(block).load(Ordering::Acquire) >= self.version.0 {
            return Turn::Done;
        }
        let (slot, mut copy) = self.tier.take_undo();
        let mut target = copy.bytes_mut();
        for array in state.arrays {
            let (part, rest) = target.split_at_mut(array.len());
            part.copy_from_slice(array);
            target = rest;
        }
        *lock(&self.tier.undo_held[slot]) = Some(copy);
        // Release: the copy is whole before the slot says so, and it says so before the block is touched.
        self.tier.undo_words(slot)[1].store(self.version.0, Ordering::Release);
        self.tier.undo_words(slot)[0].store(block as u64 + 1, Ordering::SeqCst);
        std::sync::atomic::fence(Ordering::SeqCst);
        Turn::Go(slot)
    }

    fn end(&self, block: usize, slot: usize, _: StateRef<'_>, _: &[u8]) {
        std::sync::atomic::fence(Ordering::SeqCst);
        self.tier.block(self.first_block + block).store(self.version.0, Ordering::SeqCst);
        self.tier.undo_words(slot)[0].store(0, Ordering::SeqCst);
        if let Some(copy) = lock(&self.tier.undo_held[slot]).take() {
            lock(&self.tier.undo).push((slot, copy));
            self.tier.undo_freed.notify_one();
        }
    }
}

impl Tier for ShmTier {
    fn kind(&self) -> TierKind {
        TierKind::Shm
    }

    fn keeps_contributions(&self) -> bool {
        true
    }

    fn load(&self, owned: usize, load: &mut dyn FnMut(StateMut<'_>)) -> Result<(), Fault> {
        self.memory.load(owned, load)
    }

    fn update(
        &self,
        owned: Range<usize>,
        version: Version,
        update: &mut dyn FnMut(Vec<StateMut<'_>>, &dyn Guard),
    ) -> Result<(), Fault> {
        let owned = owned.start;
        let guard = Undo { tier: self, first_block: self.blocks[owned], version };
        self.carry(owned, version, &mut || {
            // The memory tier's load cannot fail.
            let _ = self.memory.load(owned, &mut |state| update(vec![state], &guard));
        })
    }

    fn carry(&self, owned: usize, version: Version, carry: &mut dyn FnMut()) -> Result<(), Fault> {
        let words = self.shard(owned);
        words[0].store(version.0, Ordering::SeqCst);
        std::sync::atomic::fence(Ordering::SeqCst);
        carry();
        std::sync::atomic::fence(Ordering::SeqCst);
        words[1].store(version.0, Ordering::SeqCst);
        Ok(())
    }

    fn read(&self, owned: usize, read: &mut dyn FnMut(StateRef<'_>)) -> Result<(), Fault> {
        self.memory.read(owned, read)
    }

    fn start(&self, record: &Record) -> Result<(), Fault> {
        let version = record.version.0;
        let older = u64::from(self.older_loaded.load(Ordering::Relaxed) && version > 0);
        for owned in 0..self.shards() {
            for (word, value) in self.shard(owned).iter().zip([version, version, version - older, 0, 0]) {
                word.store(value, Ordering::SeqCst);
            }
        }
        (0..self.blocks[self.shards()]).for_each(|block| self.block(block).store(version, Ordering::SeqCst));
        std::sync::atomic::fence(Ordering::SeqCst);
        self.write_record(record)
    }

    fn joined(&self, rank: Rank, joined: Joined, over: bool) {
        let summed = (0..self.shards()).flat_map(|owned| &self.shard(owned)[SUMMED..]);
        summed.filter(|_| over).for_each(|word| word.store(0, Ordering::SeqCst));
        // A version with the incarnation before is too new, of a process that is being replaced.
        let at = 2 * joined.at.0 + u64::from(joined.fence_only);
        self.joined_at.get()[rank.index()].store(at, Ordering::SeqCst);
        std::sync::atomic::fence(Ordering::SeqCst);
        self.ranks()[rank.index()].store(joined.incarnation.0, Ordering::SeqCst);
    }

    fn who_joined(&self) -> Vec<Option<Joined>> {
        let ranks = self.ranks().iter().zip(self.joined_at.get());
        let joined = |(incarnation, at): (&AtomicU64, &AtomicU64)| {
            let [incarnation, at] = [incarnation, at].map(|word| word.load(Ordering::Acquire));
            let (incarnation, at, fence_only) = (Incarnation(incarnation), Version(at / 2), at % 2 == 1);
            (incarnation.0 > 0).then_some(Joined { incarnation, at, fence_only })
        };
        ranks.map(joined).collect()
    }

    fn complete(&self, owned: usize, step: Step) {
        // The sum is whole before the word says so.
        std::sync::atomic::fence(Ordering::SeqCst);
        self.shard(owned)[SUMMED + (step.0 % 2) as usize].store(step.0, Ordering::SeqCst);
    }

    fn decide(&self, record: &Record) -> Result<(), Fault> {
        self.watch.check()?;
        self.write_record(record)
    }

    fn stand(&self, record: &Record) -> Result<(), Fault> {
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

    fn store_image(&self, _: usize, age: ImageAge, _: &[u8]) -> Result<(), Fault> {
        // It lies in the job's buffers, which are files here.
        self.older_loaded.fetch_or(age == ImageAge::Older, Ordering::Relaxed);
        Ok(())
    }

    fn forget_images(&self) {
        self.older_loaded.store(false, Ordering::Relaxed);
    }

    fn discard(&self) -> Result<(), Fault> {
        remove_all(std::slice::from_ref(&self.folder.path))
    }
}

fn watch(folder: &Folder) -> Watch {
    Watch::over(std::iter::once(&*folder.path), &[HEADER_FILE, "state", "buffers", "progress"])
}

/// What was said of a version since its record was written. The one before stays whole while the next is written.
#[derive(Serialize, Deserialize)]
struct Note {
    version: Version,
    number: u64,
    #[serde(default, with = "exact::standing")]
    standing: Option<Standing>,
}

/// From the start of a record's area.
fn note_at(place: usize) -> usize {
    RECORD_BYTES - (NOTES - place) * NOTE_BYTES
}

fn newest_note(area: &[u8], version: Version) -> Option<Note> {
    let notes = (0..NOTES).filter_map(|place| match decode::<Note>(&area[note_at(place)..][..NOTE_BYTES]) {
        Found::Valid(note) if note.version == version => Some(note),
        // Another version's, or torn: nobody was told of it.
        _ => None,
    });
    notes.max_by_key(|note| note.number)
}

/// Elsewhere each step would write the whole state to a disk, in no order that survives a power failure.
fn check_tmpfs(dir: &Path) -> Result<(), Fault> {
    let found = rustix::fs::statfs(dir).map_err(|error| io("look at", dir)(error.into()))?;
    if found.f_type as i64 == TMPFS_MAGIC {
        return Ok(());
    }
    let remedy = "name a directory of a tmpfs (/dev/shm, or mount one), or open the job with tier nvme";
    Err(Fault::new(FaultKind::Precondition, FIELD, dir.display(), "on a tmpfs for tier shm", remedy))
}

/// `least`: what it must have already; 0: it is made.
fn map_file(path: &Path, bytes: usize, least: usize) -> Result<Slab, Fault> {
    let create = least == 0;
    let opened: Result<File, _> =
        OpenOptions::new().read(true).write(true).create_new(create).mode(0o600).open(path);
    let file = opened.map_err(io("open", path))?;
    let length = file.metadata().map_err(io("look at", path))?.len();
    if length < least as u64 {
        let value = format!("{} ({length} bytes)", path.display());
        return Err(super::fault::corrupt(
            value,
            format!("{least} bytes"),
            "remove the folder and restore a checkpoint",
        ));
    }
    Slab::over_file(&file, bytes).map_err(|error| io("reserve", path)(error.source))
}

/// The records of a `progress` file: whole ones, and why others are not.
pub(super) fn records_of(file: &File, path: &Path) -> Result<Vec<Result<Record, String>>, Fault> {
    let mut area = vec![0; RECORD_BYTES];
    let mut records = Vec::new();
    for parity in 0..2 {
        file.read_exact_at(&mut area, parity * RECORD_BYTES as u64).map_err(io("read", path))?;
        match decode::<RecordJson>(&area) {
            Found::Blank => {}
            Found::Valid(json) => records.push(Ok(json.into())),
            Found::Broken(why) => records.push(Err(why)),
        }
    }
    Ok(records)
}
