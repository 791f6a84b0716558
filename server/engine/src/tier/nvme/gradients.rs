//! Gradients on the drives: the place of each contribution and each sum, in files that no later process
//! reads.

use std::{
    fs,
    ops::Range,
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use longshore_proto::{Fault, JobSpec, Layout, Rank, ShardId};

use super::super::{
    fault::io,
    gradients::{GradientId, GradientStore, Kind, Moved, gradient_bytes},
    storage::Inputs,
};
use super::debts::Debts;
use crate::{
    ids::OwnedShard,
    io::{Direction, Disk, Part, Request},
    lock,
    memory::Region,
};

const GRADIENT_FILE: &str = "gradients";

/// Gradient files, one in each state directory. An open file has no name, so the kernel frees its space however the
/// process ends. Workers send gradients again.
///
/// ```text
/// shard, shard, ...     each: [gradient slot 0: contributor 0, contributor 1, ..., sum] [gradient slot 1: ...]
/// ```
pub(in crate::tier) struct GradientFiles {
    plan: GradientPlan,
    disks: Vec<Arc<dyn Disk>>,
    debts: Arc<Mutex<Debts>>,
    slots: u64,
    written: AtomicU64,
}

struct GradientPlan {
    shards: Vec<GradientExtent>,
    files: Vec<u64>,
    wire: u64,
}

struct GradientExtent {
    shard: ShardId,
    file: usize,
    at: u64,
    elements: u64,
    contributors: Vec<Rank>,
    /// The bytes of an element of the sum, or 0 if a lone contribution needs no sum.
    sum: u64,
}

impl GradientPlan {
    /// Returns a plan in which the gradients of `held`, the shards at opening, come first.
    fn new(spec: &JobSpec, layout: &Layout, held: &[ShardId], files: usize) -> GradientPlan {
        let mut plan =
            GradientPlan { shards: Vec::new(), files: vec![0; files], wire: spec.gradient_dtype.bytes() };
        let mut is_other = vec![true; layout.shards() as usize];
        held.iter().for_each(|shard| is_other[shard.index()] = false);
        let others = (0..layout.shards()).map(ShardId).filter(|shard| is_other[shard.index()]);
        // Files take the trained shards in turn, so that files without a shard are the last ones.
        let mut trained = 0;
        for shard in held.iter().copied().chain(others) {
            let (file, elements) = (trained % files, layout.shard_len(shard));
            trained += usize::from(!layout.is_frozen(shard));
            let contributors = layout.contributors(shard).to_vec();
            let sum = if spec.accumulates(&contributors) { 4 } else { 0 };
            let extent = GradientExtent { shard, file, at: plan.files[file], elements, contributors, sum };
            plan.files[file] += plan.bytes(spec.gradient_slots() as u64, &extent);
            plan.shards.push(extent);
        }
        plan.shards.sort_by_key(|extent| extent.shard);
        plan
    }

    /// The bytes that a shard's gradients take.
    fn bytes(&self, slots: u64, extent: &GradientExtent) -> u64 {
        extent.elements * self.slot_bytes(extent) * slots
    }

    /// The bytes that all contributions take for one element.
    fn contribution_bytes(&self, extent: &GradientExtent) -> u64 {
        extent.contributors.len() as u64 * self.wire
    }

    fn slot_bytes(&self, extent: &GradientExtent) -> u64 {
        self.contribution_bytes(extent) + extent.sum
    }

    fn offset(&self, GradientId { owned, slot, kind }: GradientId) -> u64 {
        let extent = &self.shards[owned.index()];
        let before = match kind {
            Kind::Contribution(contributor) => contributor.index() as u64 * self.wire,
            Kind::Sum => self.contribution_bytes(extent),
        };
        extent.at + extent.elements * (slot.index() as u64 * self.slot_bytes(extent) + before)
    }
}

/// Returns the space that gradients take in the state directories, and the bytes of it that a step writes.
pub(super) fn need(spec: &JobSpec, layout: &Layout, owned: &[ShardId]) -> (u64, u64) {
    let bytes = owned.iter().map(|&shard| gradient_bytes(spec, layout, shard));
    let disk: u64 = bytes.map(|(contributions, sums)| contributions + sums).sum();
    (disk, disk / spec.gradient_slots() as u64 * u64::from(spec.micro_steps))
}

impl GradientFiles {
    /// `folders` were taken for this job, one in each state directory.
    pub(super) fn create(inputs: &Inputs<'_>, folders: &[PathBuf]) -> Result<GradientFiles, Fault> {
        let (spec, held) = (inputs.spec, inputs.placement.held(inputs.server));
        let plan = GradientPlan::new(spec, inputs.layout, &held, folders.len());
        let opener = inputs.storage.opener();
        let create = |(folder, _): (&PathBuf, &u64)| {
            let path = folder.join(GRADIENT_FILE);
            // A process that was killed between creation and removal may have left a file.
            let _ = fs::remove_file(&path);
            let disk = opener.create(&path).map_err(io("create", &path))?;
            // The removal may fail, since a simulated disk has no file.
            let _ = fs::remove_file(&path);
            Ok(disk)
        };
        let used = folders.iter().zip(&plan.files).filter(|(_, bytes)| **bytes > 0);
        let disks = used.map(create).collect::<Result<Vec<_>, Fault>>()?;
        let debts = Arc::new(Mutex::new(Debts::new(disks.len())));
        let (slots, written) = (spec.gradient_slots() as u64, AtomicU64::new(0));
        let files = GradientFiles { plan, disks, debts, slots, written };
        held.iter().try_for_each(|shard| files.make_room(OwnedShard(shard.index())))?;
        Ok(files)
    }
}

impl GradientFiles {
    /// The part of a file that a shard's gradients take. None for a frozen shard.
    fn space(&self, owned: OwnedShard) -> Option<(&dyn Disk, Range<u64>)> {
        let extent = &self.plan.shards[owned.index()];
        let bytes = self.plan.bytes(self.slots, extent);
        (bytes > 0).then(|| (&*self.disks[extent.file], extent.at..extent.at + bytes))
    }
}

impl GradientStore for GradientFiles {
    fn start(&self, direction: Direction, id: GradientId, within: Range<usize>, buffer: Region, done: Moved) {
        let file = self.plan.shards[id.owned.index()].file;
        let disk = &self.disks[file];
        let doing = match direction {
            Direction::Read => "read gradients",
            Direction::Write => {
                self.written.fetch_add(within.len() as u64, Ordering::Relaxed);
                "write gradients"
            }
        };
        let path = disk.path().to_path_buf();
        let offset = self.plan.offset(id) + within.start as u64;
        lock(&self.debts).asked(file, Instant::now());
        let debts = Arc::clone(&self.debts);
        disk.submit(Request {
            direction,
            parts: vec![Part { offset, range: 0..within.len() }],
            buffer,
            done: Box::new(move |buffer, result| {
                lock(&debts).answered(file, Instant::now());
                done(buffer, result.map_err(io(doing, &path)));
            }),
        });
    }

    fn check(&self, now: Instant) -> Result<(), Fault> {
        let silent = lock(&self.debts).silent(now);
        silent.map_or(Ok(()), |silent| Err(silent.fault(self.disks[silent.drive].path())))
    }

    fn make_room(&self, owned: OwnedShard) -> Result<(), Fault> {
        let Some((disk, space)) = self.space(owned) else { return Ok(()) };
        disk.reserve(space).map_err(io("reserve space for gradients", disk.path()))
    }

    fn release(&self, owned: OwnedShard) {
        let Some((disk, space)) = self.space(owned) else { return };
        if let Err(error) = disk.give_back(space) {
            tracing::debug!(%error, "space of gradients stays");
        }
    }

    fn describe(&self, GradientId { owned, kind, .. }: GradientId) -> String {
        let GradientExtent { shard, file, contributors, .. } = &self.plan.shards[owned.index()];
        let path = self.disks[*file].path().display();
        match kind {
            Kind::Contribution(contributor) => {
                format!("{path}, gradient of {shard} from {}", contributors[contributor.index()])
            }
            Kind::Sum => format!("{path}, summed gradient of {shard}"),
        }
    }

    fn written_bytes(&self) -> u64 {
        self.written.load(Ordering::Relaxed)
    }
}
