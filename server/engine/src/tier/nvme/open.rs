//! Creation of a store, or recovery of its newest version, on the thread that opens the job.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicU64, Ordering},
};

use longshore_proto::{Fault, FaultKind, JobSpec, Layout, ShardId};

use super::{
    super::{
        claim,
        contract::{Durable, Opened, Recovered, Store},
        fault::{conflict, io},
        folder::{ALL_PLACES, Folder, HEADER_FILE, Header, Watch, paths, vanished},
        storage::{Inputs, Storage, StoreNeed},
        stored::{finish_job, remove_all, said},
    },
    NvmeTier, Recovery,
    durable::{Roots, StoredRecord, Tables, VersionWriter, WriterThread},
    gradients::{self, GradientFiles},
    pager::{BlockChecksums, ShardPager},
    parts::{PART_BYTES, ReadWindow},
    plan::{self, Slots, StorePlan},
    ranks::{self, Ranks},
    recover::{Blocks, Records, read_table, unread_remedy},
};
use crate::{
    admission::exhausted,
    io::Disk,
    memory::{AllocationError, Region, Slab},
    record::Record,
};

const DATA_FILE: &str = "data";
const RANKS_FILE: &str = "ranks";

struct StoreMemory {
    buffers: Vec<Region>,
    resident: Vec<Option<Region>>,
    meta: Vec<Region>,
}

pub(in crate::tier) fn need(
    spec: &JobSpec,
    layout: &Layout,
    owned: &[ShardId],
    storage: &Storage,
) -> StoreNeed {
    let plan =
        StorePlan::new(spec, layout, owned, storage.dirs.len().max(1), storage.spills(spec), ALL_PLACES);
    let resident = residents(&plan, storage);
    let of_residents = plan.shards.iter().zip(&resident).filter(|(_, resident)| **resident);
    let resident_bytes: usize = of_residents.map(|(place, _)| place.bytes()).sum();
    let buffers = buffers(&plan, &resident, storage) * plan.largest()
        + plan.files.len() * plan.meta_bytes()
        + ReadWindow::bytes(plan.pulled_parts(PART_BYTES));
    let written: usize = plan.opened().filter(|place| !place.frozen).map(|place| place.bytes()).sum();
    let (rank_memory, rank_disk) = ranks::need(spec.world_size);
    let mut need = StoreNeed {
        buffers: buffers as u64 + rank_memory,
        state: resident_bytes as u64,
        disk: plan.disk_bytes() + rank_disk,
        written: written as u64,
    };
    if storage.spills(spec) {
        let (disk, written) = gradients::need(spec, layout, owned);
        need.disk += disk;
        need.written += written;
    }
    need
}

/// Returns the space of one more shard.
pub(in crate::tier) fn shard_space(spec: &JobSpec, layout: &Layout, shard: ShardId, spilled: bool) -> u64 {
    let gradients = if spilled { gradients::need(spec, layout, &[shard]).0 } else { 0 };
    plan::shard_space(spec, layout, shard, spilled) + gradients
}

/// Marks the resident shards among those that the store is made with. As many as fit are resident, spread evenly, so
/// that the disk is busy during all of a step.
fn residents(plan: &StorePlan, storage: &Storage) -> Vec<bool> {
    let count = plan.opened().count() as u64;
    let total: usize = plan.opened().map(|place| place.bytes()).sum();
    let largest = plan.largest().max(1) as u64;
    let all = storage.resident_bytes >= total as u64;
    let fitting = if all { count } else { (storage.resident_bytes / largest).min(count) };
    let mut numbers = 0..count;
    let mut is_resident =
        || numbers.next().is_some_and(|of| (of + 1) * fitting / count > of * fitting / count);
    plan.shards.iter().map(|place| place.opened && is_resident()).collect()
}

/// Number of buffers, at most one for each shard that is not resident.
fn buffers(plan: &StorePlan, resident: &[bool], storage: &Storage) -> usize {
    let residents = resident.iter().filter(|resident| **resident).count();
    storage.buffers.max(1).min(plan.order.len() - residents)
}

impl StoreMemory {
    fn allocate(plan: &StorePlan, storage: &Storage) -> Result<StoreMemory, AllocationError> {
        let resident = residents(plan, storage);
        let count = buffers(plan, &resident, storage);
        let of_residents = plan.shards.iter().zip(&resident).filter(|(_, resident)| **resident);
        let mut sizes = vec![plan.largest(); count];
        sizes.extend(vec![plan.meta_bytes(); plan.files.len()]);
        sizes.extend(of_residents.map(|(place, _)| place.bytes()));
        let slab = Slab::allocate(Slab::bytes_for(sizes.iter().copied()))?;
        let mut regions = slab.carve_here(&sizes).into_iter();
        let buffers = regions.by_ref().take(count).collect();
        let meta = regions.by_ref().take(plan.files.len()).collect();
        let resident =
            resident.iter().map(|&resident| if resident { regions.next() } else { None }).collect();
        Ok(StoreMemory { buffers, resident, meta })
    }
}

pub(in crate::tier) fn open(
    inputs: &Inputs<'_>,
    notify: Box<dyn Fn() + Send + Sync>,
) -> Result<Opened, Fault> {
    let (tier, record) = NvmeTier::open(inputs, notify)?;
    let gradients =
        inputs.storage.spills(inputs.spec).then(|| GradientFiles::create(inputs, &paths(&tier.folders)));
    // A store that was just made must not stay behind.
    let gradients = gradients.transpose().inspect_err(|_| {
        _ = record.is_none().then(|| tier.discard());
    })?;
    let tier = Arc::new(tier);
    let store = Store {
        durable: Some(tier.clone()),
        behind: Some(tier.clone()),
        images: tier.plan().images.then(|| tier.clone() as _),
        gradients: gradients.map(|gradients| Arc::new(gradients) as _),
        ..Store::of(tier)
    };
    Ok(Opened { store, buffers: None, recovered: record.map_or(Recovered::Nothing, Recovered::Version) })
}

impl NvmeTier {
    /// Creates the job's store or recovers it. A returned record must be read whole, and adopted, before the
    /// store's first step.
    pub(super) fn open(
        inputs: &Inputs<'_>,
        notify: Box<dyn Fn() + Send + Sync>,
    ) -> Result<(NvmeTier, Option<Record>), Fault> {
        let storage = inputs.storage;
        if storage.dirs.is_empty() {
            let remedy = "start the server with --state-dir, or open the job with the memory tier";
            return Err(Fault::new(
                FaultKind::Precondition,
                "state_dir",
                "not set",
                "set for tier nvme",
                remedy,
            ));
        }
        finish_job(&storage.dirs, &inputs.spec.name);
        let mut folders = take(inputs)?;
        let existing = in_order(&mut folders, &header(inputs, 0))?;
        let (spilled, held) = (storage.spills(inputs.spec), inputs.placement.held(inputs.server));
        let format = existing.as_ref().map_or(ALL_PLACES, |header| header.format);
        let plan = StorePlan::new(inputs.spec, inputs.layout, &held, folders.len(), spilled, format);
        let memory = StoreMemory::allocate(&plan, storage).map_err(exhausted)?;
        let Some(Header { store, .. }) = existing else {
            let store = create(inputs, &mut folders, &plan)?;
            let homes = paths(&folders);
            let tier = NvmeTier::assemble(inputs, folders, plan, memory, store, true, notify);
            let tier = tier.inspect_err(|_| _ = said(remove_all(&homes)))?;
            return Ok((tier, None));
        };
        let tier = NvmeTier::assemble(inputs, folders, plan, memory, store, false, notify)?;
        let record = tier.find(storage)?;
        Ok((tier, record))
    }

    /// `fresh` means that the store was just made.
    fn assemble(
        inputs: &Inputs<'_>,
        folders: Vec<Folder>,
        plan: StorePlan,
        memory: StoreMemory,
        store: u64,
        fresh: bool,
        notify: Box<dyn Fn() + Send + Sync>,
    ) -> Result<NvmeTier, Fault> {
        let disks = open_disks(inputs, &folders)?;
        let path = folders[0].path.join(RANKS_FILE);
        let disk = inputs.storage.opener().open(&path).map_err(io("open", &path))?;
        let ranks = Ranks::open(disk, store, inputs.spec.world_size, fresh)?;
        let watched = [HEADER_FILE, DATA_FILE, RANKS_FILE];
        let watch = Watch::over(folders.iter().map(|folder| &*folder.path), &watched);
        let StoreMemory { buffers, resident, meta } = memory;
        let reads = Arc::new(ReadWindow::allocate(plan.pulled_parts(PART_BYTES)).map_err(exhausted)?);
        let pager = Arc::new(ShardPager::new(plan, inputs.server, disks, buffers, resident, notify));
        let meta = meta.into_iter().map(|region| Mutex::new(Some(region))).collect();
        let tables = Mutex::new(vec![Tables::default(); pager.disks.len()]);
        let (writes, epoch) = (Arc::clone(&pager), Mutex::new(1));
        let writer = Arc::new(VersionWriter { pager: writes, tables, store, epoch, meta, watch });
        let writer_thread = WriterThread::start(Arc::clone(&writer)).map_err(|error| {
            Fault::new(FaultKind::Exhausted, "thread", error, "started", "raise the process limit")
        })?;
        Ok(NvmeTier { writer_thread, writer, pager, recovery: Mutex::new(None), reads, ranks, folders })
    }

    /// Returns the record of the recovered version, with its tables in place. None if the store was never loaded to the
    /// end.
    fn find(&self, storage: &Storage) -> Result<Option<Record>, Fault> {
        let records = self.records()?;
        let Some(stored) = records.choose(storage.at_most)? else { return Ok(None) };
        let StoredRecord { slots, roots, record, epoch, apart, .. } = stored.clone();
        let previous = records.valid.keys().copied().rfind(|version| *version < record.version);
        let with_remedy = |fault| Fault { remedy: unread_remedy(previous), ..fault };
        for (file, roots) in roots.iter().enumerate() {
            self.load_tables(file, slots, roots).map_err(with_remedy)?;
        }
        for apart in &apart {
            let Some(&owned) = self.pager.plan.order.get(apart.owned) else { continue };
            let file = self.pager.plan.shards[owned.index()].file;
            let (disk, meta) = (&*self.pager.disks[file], &self.writer.meta[file]);
            let read = Blocks { plan: &self.pager.plan, disk, meta }.apart(owned, apart);
            if let Some(checksums) = read.map_err(with_remedy)? {
                self.pager.lies_apart(owned, &checksums);
            }
        }
        *crate::lock(&self.writer.epoch) = epoch + 1;
        let newer = records.valid.keys().copied().filter(|version| *version > record.version).collect();
        let recovery = Recovery { record: record.clone(), slots, previous, newer };
        *crate::lock(&self.recovery) = Some(recovery);
        self.pager.recovered(slots, &record, &apart);
        Ok(Some(record))
    }

    pub(super) fn records(&self) -> Result<Records, Fault> {
        let disks: Vec<&dyn Disk> = self.pager.disks.iter().map(|disk| &**disk).collect();
        let meta: Vec<_> = self.writer.meta.iter().collect();
        Records::read(&self.pager.plan, &disks, &meta, self.writer.store)
    }

    fn load_tables(&self, file: usize, slots: Slots, roots: &Roots) -> Result<(), Fault> {
        let plan = &self.pager.plan.files[file];
        let at = (plan.state_table_at(slots.state), roots.state);
        crate::lock(&self.writer.tables)[file].state[slots.state as usize] = roots.state;
        self.load_table(file, at, &format!("slot {}", slots.state), |checksums| &checksums.state)?;
        let images = [(Some(slots.image), roots.image), (slots.older_image, roots.older_image)];
        for (slot, root) in images.into_iter().filter(|_| self.pager.plan.images) {
            let Some(slot) = slot else { continue };
            crate::lock(&self.writer.tables)[file].image[slot as usize] = root;
            let at = (plan.image_table_at(slot), root);
            let what = format!("image slot {slot}");
            self.load_table(file, at, &what, |checksums| &checksums.images[slot as usize])?;
        }
        Ok(())
    }

    fn load_table(
        &self,
        file: usize,
        at: (u64, u64),
        what: &str,
        cells: impl Fn(&BlockChecksums) -> &Vec<AtomicU64>,
    ) -> Result<(), Fault> {
        let plan = &self.pager.plan.files[file];
        let table = read_table(&*self.pager.disks[file], &self.writer.meta[file], plan, at, what)?;
        let cells = plan.owned.iter().flat_map(|&owned| cells(&self.pager.checksums[owned.index()]));
        cells.zip(table).for_each(|(checksum, found)| checksum.store(found, Ordering::Relaxed));
        Ok(())
    }
}

fn header(inputs: &Inputs<'_>, store: u64) -> Header {
    Header::new(inputs, ALL_PLACES, store, inputs.storage.dirs.len())
}

fn take(inputs: &Inputs<'_>) -> Result<Vec<Folder>, Fault> {
    let (dirs, servers) = (&inputs.storage.dirs, inputs.placement.servers.len());
    let mut folders = Vec::with_capacity(dirs.len());
    for dir in dirs {
        let home = Folder::path(dir, &inputs.spec.name, inputs.server, servers);
        folders.push(Folder::take(home).inspect_err(|_| remove_empty(&folders))?);
    }
    Ok(folders)
}

/// Puts the folders into the order of their creation, whatever the order of the directories now. Returns None if all
/// are new.
fn in_order(folders: &mut Vec<Folder>, wanted: &Header) -> Result<Option<Header>, Fault> {
    let read = |folder: &Folder| {
        if folder.is_new() {
            return Ok(None);
        }
        let header = Header::read(&folder.path)?;
        header.as_ref().map_or(Ok(()), |header| header.check_same(wanted, &folder.path))?;
        Ok(header)
    };
    let read = folders.iter().map(read).collect::<Result<Vec<_>, Fault>>();
    let headers = read.inspect_err(|_| remove_empty(folders))?;
    let Some(first) = headers.iter().flatten().next().cloned() else { return Ok(None) };
    if let Some(missing) = headers.iter().position(Option::is_none) {
        let fault = vanished(folders[missing].home());
        remove_empty(folders);
        return Err(fault);
    }
    let mut placed: Vec<Option<Folder>> = folders.iter().map(|_| None).collect();
    for (folder, header) in folders.drain(..).zip(headers.into_iter().flatten()) {
        let place = placed.get_mut(header.directory).filter(|place| place.is_none());
        match place.filter(|_| header.store == first.store) {
            Some(place) => *place = Some(folder),
            None => {
                let value =
                    format!("{} (directory {} of another store)", folder.path.display(), header.directory);
                let remedy = "name the state directories that belong together";
                return Err(conflict(value, "of one store", remedy));
            }
        }
    }
    folders.extend(placed.into_iter().flatten());
    Ok(Some(first))
}

fn open_disks(inputs: &Inputs<'_>, folders: &[Folder]) -> Result<Vec<Arc<dyn Disk>>, Fault> {
    let opener = inputs.storage.opener();
    let open = |folder: &Folder| {
        let path = folder.path.join(DATA_FILE);
        opener.open(&path).map_err(io("open", &path))
    };
    folders.iter().map(open).collect()
}

/// Makes a store under temporary names, which become the job's once the store is complete.
fn create(inputs: &Inputs<'_>, folders: &mut [Folder], plan: &StorePlan) -> Result<u64, Fault> {
    let store = Header::unique_store();
    let dirs = &inputs.storage.dirs;
    let checked = dirs.iter().try_for_each(|dir| claim::check(dir));
    let made = checked.and_then(|()| fill(inputs, folders, plan, store)).and_then(|()| {
        dirs.iter().for_each(|dir| claim::note(dir, &inputs.spec.name));
        folders.iter_mut().try_for_each(Folder::settle)
    });
    made.inspect_err(|_| _ = said(remove_all(&paths(folders)))).map(|()| store)
}

fn fill(inputs: &Inputs<'_>, folders: &[Folder], plan: &StorePlan, store: u64) -> Result<(), Fault> {
    let opener = inputs.storage.opener();
    for (directory, folder) in folders.iter().enumerate() {
        folder.clear()?;
        let path = folder.path.join(DATA_FILE);
        let disk = opener.create(&path).map_err(io("create", &path))?;
        let mut parts = plan.space_at_first(directory).into_iter();
        parts.try_for_each(|part| disk.reserve(part)).map_err(io("reserve space", &path))?;
        if directory == 0 {
            ranks::create(&*opener, &folder.path.join(RANKS_FILE), inputs.spec.world_size)?;
        }
        folder.publish(&Header { directory, ..header(inputs, store) })?;
    }
    Ok(())
}

/// Removes folders that were just made, after another folder turned out wrong.
fn remove_empty(folders: &[Folder]) {
    for folder in folders {
        // The system refuses to remove a folder that is not empty.
        let _ = std::fs::remove_dir(&folder.path);
        if let Some(job) = folder.path.parent() {
            let _ = std::fs::remove_dir(job);
        }
    }
}
