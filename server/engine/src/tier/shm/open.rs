//! Creation of a `shm` job's files, or recovery of existing ones.

use std::{
    fs::{File, OpenOptions},
    os::unix::fs::OpenOptionsExt,
    path::Path,
    sync::{Arc, Condvar, Mutex},
};

use longshore_proto::{Fault, FaultKind, JobSpec, Layout, Placement, ServerId, ShardId};

use super::{
    BLOCK, SETTLED_WORDS, SHARD_WORDS, SUM_WORDS, ShmTier, UNDO_SLOTS, UNDO_WORDS, records::damaged,
};
use crate::{
    memory::{AllocationError, AtomicWords, Slab},
    threads::ThreadPool,
    tier::{
        contract::{Interrupted, Opened, Recovered, Store},
        fault::{FIELD, SHM_FIELD, io, named},
        folder::{ALL_PLACES, FORMAT_VERSION, Folder, HEADER_FILE, Header, Watch},
        memory::MemoryTier,
        record::RECORD_BYTES,
        state::Shape,
        storage::{Inputs, Storage},
        stored::{finish_job, remove_all},
    },
};

const TMPFS_MAGIC: i64 = 0x0102_1994;

/// Creates the job's files or finds them. `buffers` is the bytes of the job's other buffers, and `pool` is the
/// threads that will update the state.
pub(in crate::tier) fn open(inputs: &Inputs<'_>, buffers: usize, pool: &ThreadPool) -> Result<Opened, Fault> {
    let (tier, buffers, interrupted) = ShmTier::open(inputs, buffers, pool).map_err(named(SHM_FIELD))?;
    let tier = Arc::new(tier);
    let store = Store { durable: Some(tier.clone()), kept: Some(tier.clone()), ..Store::of(tier) };
    let recovered = interrupted.map_or(Recovered::Nothing, Recovered::Interrupted);
    Ok(Opened { store, buffers: Some(buffers), recovered })
}

/// Returns the bytes that a job takes in the tmpfs in addition to its state and buffers.
pub(in crate::tier) fn overhead(spec: &JobSpec, layout: &Layout) -> u64 {
    let all: Vec<ShardId> = (0..layout.shards()).map(ShardId).collect();
    Sizes::new(spec, layout, &all, 0).progress_bytes() as u64
}

/// Format of the files that a server has of a job, or makes.
pub(in crate::tier) fn format(
    spec: &JobSpec,
    placement: &Placement,
    server: ServerId,
    storage: &Storage,
) -> Result<u32, Fault> {
    let Some(dir) = &storage.shm_dir else { return Ok(ALL_PLACES) };
    let home = Folder::path(dir, &spec.name, server, placement.servers.len());
    let header = Header::read(&home).map_err(named(SHM_FIELD))?;
    Ok(header.map_or(ALL_PLACES, |header| header.format))
}

/// The sizes of the files, and of the sections of `progress`.
pub(super) struct Sizes {
    pub(super) state: usize,
    pub(super) buffers: usize,
    pub(super) progress: Vec<usize>,
    /// The shards that have a place.
    pub(super) owned: Vec<ShardId>,
    pub(super) lengths: Vec<usize>,
    pub(super) shapes: Vec<Shape>,
    /// Index of each shard's first block; one more at the end.
    pub(super) blocks: Vec<usize>,
}

impl Sizes {
    pub(super) fn new(spec: &JobSpec, layout: &Layout, owned: &[ShardId], buffers: usize) -> Sizes {
        let lengths: Vec<usize> = owned.iter().map(|&shard| layout.shard_len(shard) as usize).collect();
        let mut blocks = vec![0];
        for length in &lengths {
            blocks.push(blocks[blocks.len() - 1] + length / BLOCK);
        }
        let shapes = Shape::of_shards(spec, layout, owned);
        let ranks = spec.world_size as usize;
        let words = lengths.len() * SHARD_WORDS + blocks[lengths.len()] + UNDO_SLOTS * UNDO_WORDS + ranks;
        let mut progress = vec![2 * RECORD_BYTES, words * 8];
        progress.extend(vec![Shape::of(spec).bytes(BLOCK); UNDO_SLOTS]);
        progress.push(ranks * 8);
        progress.push(2 * SETTLED_WORDS * 8);
        progress.push(blocks[lengths.len()] * SUM_WORDS * 8);
        let state = MemoryTier::bytes(&lengths, &shapes);
        Sizes { state, buffers, progress, owned: owned.to_vec(), lengths, shapes, blocks }
    }

    pub(super) fn progress_bytes(&self) -> usize {
        Slab::bytes_for(self.progress.iter().copied())
    }
}

impl ShmTier {
    /// Creates the job's files or recovers them. Also returns the mapping for the job's other buffers.
    fn open(
        inputs: &Inputs<'_>,
        buffers: usize,
        pool: &ThreadPool,
    ) -> Result<(ShmTier, Slab, Option<Interrupted>), Fault> {
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
        let has_all = inputs.owned.len() == inputs.layout.shards() as usize;
        let format = if has_all { ALL_PLACES } else { FORMAT_VERSION };
        let header = Header::new(inputs, format, Header::unique_store(), 1);
        let sizes = Sizes::new(inputs.spec, inputs.layout, inputs.owned, buffers);
        if !folder.is_new()
            && let Some(found) = Header::read(&folder.path)?
        {
            found.check_same(&header, &folder.path)?;
            let (mut tier, buffers) = ShmTier::map(folder, &sizes, &header, pool, false)?;
            if let Some(kept) = tier.recover(&sizes, &header, pool)? {
                return Ok((tier, buffers, Some(kept)));
            }
            // The job was never loaded to the end, so there is nothing to go on from.
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
        pool: &ThreadPool,
    ) -> Result<(ShmTier, Slab, Option<Interrupted>), Fault> {
        folder.clear()?;
        let path = folder.path.clone();
        let made = ShmTier::map(folder, sizes, header, pool, true).and_then(|(mut tier, buffers)| {
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
        sizes: &Sizes,
        header: &Header,
        pool: &ThreadPool,
        create: bool,
    ) -> Result<(ShmTier, Slab), Fault> {
        let file = |name: &str, bytes: usize| map_file(&folder.path.join(name), bytes, create);
        let state = file("state", sizes.state)?;
        let buffers = file("buffers", sizes.buffers)?;
        let progress = file("progress", sizes.progress_bytes())?;
        let reserve = |name: &str| {
            let path = folder.path.join(name);
            move |error: AllocationError| io("reserve", &path)(error.source)
        };
        let regions = progress.carve(&sizes.progress, pool).map_err(reserve("progress"))?;
        let mut regions = regions.into_iter();
        let mut next = || regions.next().expect("one region was carved for each size");
        let (records, words) = (Mutex::new(next()), AtomicWords::new(next()));
        let undo = (0..UNDO_SLOTS).map(|slot| (slot, next())).collect();
        let [joined_at, settled, sums] = [(); 3].map(|()| AtomicWords::new(next()));
        let used = sizes.owned.iter().map(|&shard| create && header.placement.holds(header.server, shard));
        let used: Vec<bool> = used.collect();
        let memory = MemoryTier::over(state, &sizes.lengths, sizes.shapes.clone(), &used, pool)
            .map_err(reserve("state"))?;
        let tier = ShmTier {
            memory,
            words,
            joined_at,
            settled,
            sums,
            records,
            undo: Mutex::new(undo),
            undo_freed: Condvar::new(),
            undo_held: (0..UNDO_SLOTS).map(|_| Mutex::new(None)).collect(),
            blocks: sizes.blocks.clone(),
            watch: watch(&folder),
            folder,
        };
        Ok((tier, buffers))
    }
}

fn watch(folder: &Folder) -> Watch {
    Watch::over(std::iter::once(&*folder.path), &[HEADER_FILE, "state", "buffers", "progress"])
}

/// Refuses a folder outside of a tmpfs. Each step would write the whole state to a disk, in an order that survives no
/// power failure.
fn check_tmpfs(dir: &Path) -> Result<(), Fault> {
    let found = rustix::fs::statfs(dir).map_err(|error| io("look at", dir)(error.into()))?;
    if found.f_type as i64 == TMPFS_MAGIC {
        return Ok(());
    }
    let remedy = "name a directory of a tmpfs (/dev/shm, or mount one), or open the job with tier nvme";
    Err(Fault::new(FaultKind::Precondition, FIELD, dir.display(), "on a tmpfs for tier shm", remedy))
}

fn map_file(path: &Path, bytes: usize, create: bool) -> Result<Slab, Fault> {
    let opened: Result<File, _> =
        OpenOptions::new().read(true).write(true).create_new(create).mode(0o600).open(path);
    let file = opened.map_err(io("open", path))?;
    let length = file.metadata().map_err(io("look at", path))?.len();
    if !create && length < bytes as u64 {
        return Err(damaged(path, &format!("{length} of {bytes} bytes")));
    }
    Slab::over_file(file, bytes).map_err(|error| io("reserve", path)(error.source))
}
