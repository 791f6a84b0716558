//! Creation of a `shm` job's files, or recovery of existing ones.

use std::{
    fs::{File, OpenOptions},
    os::unix::fs::OpenOptionsExt,
    path::Path,
    sync::{Condvar, Mutex, atomic::AtomicBool},
};

use longshore_proto::{Fault, FaultKind, TierKind};

use super::{ShmTier, UNDO_SLOTS, records::damaged, sizes::Sizes};
use crate::{
    memory::{AtomicWords, Slab},
    threads::ThreadPool,
    tier::{
        contract::Interrupted,
        fault::{FIELD, SHM_FIELD, io, named},
        folder::{Folder, HEADER_FILE, Header},
        memory::MemoryTier,
        removal::{finish_job, remove_all},
        storage::Inputs,
        watch::Watch,
    },
};

const TMPFS_MAGIC: i64 = 0x0102_1994;

impl ShmTier {
    /// Creates the job's files or finds them. Also returns the mapping for the job's other buffers, of
    /// `buffers` bytes. `pool` is the threads that will update the state.
    pub(in crate::tier) fn open(
        inputs: &Inputs<'_>,
        buffers: usize,
        pool: &ThreadPool,
    ) -> Result<(ShmTier, Slab, Option<Interrupted>), Fault> {
        ShmTier::open_in_folder(inputs, buffers, pool).map_err(named(SHM_FIELD))
    }

    fn open_in_folder(
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
        let header = Header {
            store: Header::unique_store(),
            tier: TierKind::Shm,
            directory: 0,
            directories: 1,
            durable: true,
            spilled_images: false,
            server: inputs.server,
            placement: inputs.placement.clone(),
            owner: inputs.storage.owner.clone(),
            spec: inputs.spec.clone(),
        };
        let sizes = Sizes::new(inputs.spec, inputs.layout, inputs.owned, buffers);
        if !folder.is_new()
            && let Some(found) = Header::read(&folder.path)?
        {
            found.check_same(&header, &folder.path)?;
            let (mut tier, buffers) = ShmTier::map(folder, &sizes, pool, false)?;
            if let Some(kept) = tier.recover(&sizes, pool)? {
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
        let made = ShmTier::map(folder, sizes, pool, true).and_then(|(mut tier, buffers)| {
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

    fn map(folder: Folder, sizes: &Sizes, pool: &ThreadPool, create: bool) -> Result<(ShmTier, Slab), Fault> {
        let file = |name: &str, bytes: usize, least: usize| {
            map_file(&folder.path.join(name), bytes, if create { 0 } else { least })
        };
        let state = file("state", sizes.state, sizes.state)?;
        let buffers = file("buffers", sizes.buffers, sizes.buffers)?;
        let bytes = Slab::bytes_for(sizes.progress.iter().copied());
        let progress = file("progress", bytes, sizes.least_progress())?;
        let mut regions = progress.carve_here(&sizes.progress).into_iter();
        let mut next = || regions.next().expect("one region was carved for each size");
        let (records, words) = (Mutex::new(next()), AtomicWords::new(next()));
        let undo = (0..UNDO_SLOTS).map(|slot| (slot, next())).collect();
        let [joined_at, settled, sums] = [(); 3].map(|()| AtomicWords::new(next()));
        let memory = MemoryTier::over(state, &sizes.lengths, sizes.shapes.clone(), pool)
            .map_err(|error| io("touch", &folder.path)(error.source))?;
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
            older_loaded: AtomicBool::new(false),
            watch: watch(&folder),
            folder,
        };
        Ok((tier, buffers))
    }
}

fn watch(folder: &Folder) -> Watch {
    Watch::over(std::iter::once(&*folder.path), &[HEADER_FILE, "state", "buffers", "progress"])
}

/// Refuses a folder that is not in a tmpfs. Each step would write the whole state to a disk, in no order that
/// survives a power failure.
fn check_tmpfs(dir: &Path) -> Result<(), Fault> {
    let found = rustix::fs::statfs(dir).map_err(|error| io("look at", dir)(error.into()))?;
    if found.f_type as i64 == TMPFS_MAGIC {
        return Ok(());
    }
    let remedy = "name a directory of a tmpfs (/dev/shm, or mount one), or open the job with tier nvme";
    Err(Fault::new(FaultKind::Precondition, FIELD, dir.display(), "on a tmpfs for tier shm", remedy))
}

/// `least` is the least length of an existing file; with 0 the file is made.
fn map_file(path: &Path, bytes: usize, least: usize) -> Result<Slab, Fault> {
    let create = least == 0;
    let opened: Result<File, _> =
        OpenOptions::new().read(true).write(true).create_new(create).mode(0o600).open(path);
    let file = opened.map_err(io("open", path))?;
    let length = file.metadata().map_err(io("look at", path))?.len();
    if length < least as u64 {
        return Err(damaged(path, &format!("{length} of {least} bytes")));
    }
    Slab::over_file(&file, bytes).map_err(|error| io("reserve", path)(error.source))
}
