//! Gradients on the drives: where each contribution and each sum lies, in files that no process after this one reads.

use std::{
    fs,
    ops::Range,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::{self, Receiver},
    },
};

use longshore_proto::{Fault, JobSpec, Layout, Rank, ShardId};

use super::super::{
    Inputs,
    fault::{internal, io},
};
use super::open::opener;
use crate::{
    io::{Direction, Disk, Part, Request},
    memory::Region,
};

const GRADIENT_FILE: &str = "gradients";

/// Which of a shard's gradients of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Of one rank, in the wire's format.
    Contribution(Rank),
    /// Of all ranks and micro-steps so far, in fp32.
    Sum,
}

/// One file in each state directory. It has no name once it is open: gradients die with the process, as they do in DRAM,
/// and workers send them again; and whatever ends the process gives the space back.
///
/// ```text
/// shard, shard, ...     each: [step slot 0: rank 0, rank 1, ..., sum] [step slot 1: ...]
/// ```
pub struct GradientFiles {
    plan: Plan,
    disks: Vec<Arc<dyn Disk>>,
    written: AtomicU64,
}

/// Where things lie.
struct Plan {
    shards: Vec<Place>,
    /// Bytes of each file.
    files: Vec<u64>,
    ranks: u64,
    /// Bytes of an element of a contribution, and of a sum: 0 where a lone contribution is left as it came.
    wire: u64,
    sum: u64,
}

/// Of one shard.
struct Place {
    shard: ShardId,
    file: usize,
    at: u64,
    elements: u64,
}

impl Plan {
    fn new(spec: &JobSpec, layout: &Layout, owned: &[ShardId], files: usize) -> Plan {
        let (ranks, wire) = (u64::from(spec.world_size), spec.gradient_dtype.bytes());
        let sum = if spec.accumulates() { 4 } else { 0 };
        let mut plan = Plan { shards: Vec::new(), files: vec![0; files], ranks, wire, sum };
        for (owned, &shard) in owned.iter().enumerate() {
            let (file, elements) = (owned % files, layout.shard_len(shard));
            plan.shards.push(Place { shard, file, at: plan.files[file], elements });
            plan.files[file] += elements * plan.slot_bytes() * spec.gradient_slots() as u64;
        }
        plan
    }

    /// Of an element in one step.
    fn slot_bytes(&self) -> u64 {
        self.ranks * self.wire + self.sum
    }

    fn offset(&self, owned: usize, slot: usize, kind: Kind) -> u64 {
        let Place { at, elements, .. } = self.shards[owned];
        let before = match kind {
            Kind::Contribution(rank) => u64::from(rank.0) * self.wire,
            Kind::Sum => self.ranks * self.wire,
        };
        at + elements * (slot as u64 * self.slot_bytes() + before)
    }
}

/// Space that gradients take in the state directories, and what a step writes of it.
pub(super) fn need(spec: &JobSpec, layout: &Layout, owned: &[ShardId], files: usize) -> (u64, u64) {
    let plan = Plan::new(spec, layout, owned, files.max(1));
    let disk = plan.files.iter().sum();
    (disk, disk / spec.gradient_slots() as u64 * u64::from(spec.micro_steps))
}

/// Bytes on their way.
pub struct Transfer {
    done: Receiver<Result<Region, Fault>>,
}

impl Transfer {
    /// Gives the buffer back once its bytes are where they belong.
    pub fn wait(self) -> Result<Region, Fault> {
        self.done.recv().unwrap_or_else(|_| Err(internal("the disk's thread has ended", "running")))
    }
}

impl GradientFiles {
    /// `folders`: taken for this job, one in each state directory.
    pub(super) fn create(inputs: &Inputs<'_>, folders: &[PathBuf]) -> Result<GradientFiles, Fault> {
        let plan = Plan::new(inputs.spec, inputs.layout, inputs.owned, folders.len());
        let opener = opener(inputs.storage);
        let create = |(folder, bytes): (&PathBuf, &u64)| {
            let path = folder.join(GRADIENT_FILE);
            // Of a process killed between these lines.
            let _ = fs::remove_file(&path);
            let disk =
                opener.create(&path, *bytes, None).map_err(io("reserve space for gradients", &path))?;
            // A simulated disk has no file.
            let _ = fs::remove_file(&path);
            Ok(disk)
        };
        let used = folders.iter().zip(&plan.files).filter(|(_, bytes)| **bytes > 0);
        let disks = used.map(create).collect::<Result<_, Fault>>()?;
        Ok(GradientFiles { plan, disks, written: AtomicU64::new(0) })
    }

    pub fn written_bytes(&self) -> u64 {
        self.written.load(Ordering::Relaxed)
    }

    /// Names a part of a gradient in an error.
    pub fn describe(&self, owned: usize, kind: Kind) -> String {
        let Place { shard, file, .. } = self.plan.shards[owned];
        let path = self.disks[file].path().display();
        match kind {
            Kind::Contribution(rank) => format!("{path}, gradient of {shard} from {rank}"),
            Kind::Sum => format!("{path}, summed gradient of {shard}"),
        }
    }

    /// Starts writing the first bytes of a buffer to `within` a gradient. `done` is called on a thread of the disk.
    pub fn write(
        &self,
        (owned, slot, kind): (usize, usize, Kind),
        within: Range<usize>,
        buffer: Region,
        done: impl FnOnce(Region, Result<(), Fault>) + Send + 'static,
    ) {
        self.start(Direction::Write, (owned, slot, kind), within, buffer, done);
    }

    /// Starts filling a buffer's first bytes with a whole gradient of so many.
    pub fn read(&self, place: (usize, usize, Kind), bytes: usize, buffer: Region) -> Transfer {
        self.whole(Direction::Read, place, bytes, buffer)
    }

    /// Writes a whole gradient from a buffer's first bytes.
    pub fn write_whole(&self, place: (usize, usize, Kind), bytes: usize, buffer: Region) -> Transfer {
        self.whole(Direction::Write, place, bytes, buffer)
    }

    fn whole(
        &self,
        direction: Direction,
        place: (usize, usize, Kind),
        bytes: usize,
        buffer: Region,
    ) -> Transfer {
        let (sender, done) = mpsc::channel();
        self.start(direction, place, 0..bytes, buffer, move |buffer, result| {
            let _ = sender.send(result.map(|()| buffer));
        });
        Transfer { done }
    }

    fn start(
        &self,
        direction: Direction,
        (owned, slot, kind): (usize, usize, Kind),
        within: Range<usize>,
        buffer: Region,
        done: impl FnOnce(Region, Result<(), Fault>) + Send + 'static,
    ) {
        let disk = &self.disks[self.plan.shards[owned].file];
        let doing = match direction {
            Direction::Read => "read gradients",
            Direction::Write => {
                self.written.fetch_add(within.len() as u64, Ordering::Relaxed);
                "write gradients"
            }
        };
        let path = disk.path().to_path_buf();
        let offset = self.plan.offset(owned, slot, kind) + within.start as u64;
        disk.submit(Request {
            direction,
            parts: vec![Part { offset, range: 0..within.len() }],
            buffer,
            done: Box::new(move |buffer, result| done(buffer, result.map_err(io(doing, &path)))),
        });
    }
}
