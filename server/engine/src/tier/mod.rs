//! Where a job's state lives. The step protocol is the same on every tier.

mod fault;
mod folder;
pub mod inspect;
mod memory;
pub mod nvme;
mod record;
mod removal;
pub mod shm;
mod state;
mod watch;

use std::{ops::Range, path::PathBuf, sync::Arc};

use longshore_proto::{
    Commit, Fault, Incarnation, JobSpec, Layout, Placement, Rank, ServerId, ShardId, Step, TierKind, Version,
};

pub use folder::{Claim, Header, Stored, StoredJob, stored_jobs};
pub use memory::MemoryTier;
pub use removal::{delete_stored, finish_interrupted};
pub use state::{Shape, StateMut, StateRef};

use crate::io::{Engine, OpenDisk};

/// How this server stores jobs whose tier outlives it.
#[derive(Clone)]
pub struct Storage {
    /// Each job gets a folder in each of them; its shards are striped over all.
    pub dirs: Vec<PathBuf>,
    /// Folder of a tmpfs for jobs with tier `shm`.
    pub shm_dir: Option<PathBuf>,
    pub engine: Engine,
    /// In place of files; for tests.
    pub disks: Option<Arc<dyn OpenDisk>>,
    /// DRAM for shards that an `nvme` job keeps, so that they need not be read each step.
    pub resident_bytes: u64,
    /// Images in memory that workers of this host can be given to read.
    pub share_images: bool,
    /// Shards of an `nvme` job that are being read, updated or written at once.
    pub buffers: usize,
    pub durability: Durability,
    pub spill: Spill,
    /// Recover no later version than this: what a server does whose peers have lost a version that it still has.
    pub at_most: Option<Version>,
}

/// Which job's shards, and where, for a tier that outlives the process.
pub struct Inputs<'a> {
    pub spec: &'a JobSpec,
    pub layout: &'a Layout,
    pub owned: &'a [ShardId],
    pub placement: &'a Placement,
    pub server: ServerId,
    pub storage: &'a Storage,
}

/// What becomes of an `nvme` job when its server dies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Durability {
    /// Each version is made durable. Resident shards are written too, so residency saves the reads alone.
    #[default]
    EachVersion,
    /// Nothing is kept: resident shards are never written, and a step costs (1 - resident share) of the transfers. The
    /// loss is that of the memory tier: back to the last checkpoint.
    Nothing,
}

/// What of an `nvme` job lives on the drives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Spill {
    #[default]
    State,
    /// The images too, of all jobs and not of the delayed ones alone: DRAM holds those made last, pulls read the others from
    /// the drives. 2 bytes a parameter more are written in a step, and 4 less held.
    Images,
    /// And the gradients that are not lent: chunks go to the drives as they come, sums of ranks and micro-steps as they are
    /// formed, and come back for the update.
    All,
}

impl Spill {
    /// As operators write it.
    pub fn name(self) -> &'static str {
        match self {
            Spill::State => "state",
            Spill::Images => "images",
            Spill::All => "all",
        }
    }
}

impl Storage {
    /// Whether this job's images live on the drives alone.
    pub(crate) fn spills_images(&self, spec: &JobSpec) -> bool {
        spec.tier == TierKind::Nvme && self.spill != Spill::State
    }

    /// Whether this job's gradients do.
    pub(crate) fn spills_gradients(&self, spec: &JobSpec) -> bool {
        spec.tier == TierKind::Nvme && self.spill == Spill::All
    }
}

impl Default for Storage {
    fn default() -> Storage {
        Storage {
            dirs: Vec::new(),
            shm_dir: None,
            engine: Engine::Auto,
            disks: None,
            resident_bytes: 0,
            share_images: true,
            buffers: nvme::DEFAULT_BUFFERS,
            durability: Durability::EachVersion,
            spill: Spill::State,
            at_most: None,
        }
    }
}

/// A decided version, as a tier keeps it.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    pub version: Version,
    /// Steps that updated: Adam's t.
    pub applied: u64,
    /// None at version 0.
    pub commit: Option<Commit>,
    /// What was said since.
    pub standing: Option<Standing>,
}

impl Record {
    /// The record of a version that was reached a moment ago.
    pub fn new(version: Version, applied: u64, commit: Option<Commit>) -> Record {
        Record { version, applied, commit, standing: None }
    }
}

/// The last word on pausing since a version was decided. Without one what its commit says holds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Standing {
    /// Why the job is paused; None once it was resumed.
    pub paused: Option<String>,
    /// The loss scale that an operator chose with the resume, for steps that read this version.
    pub loss_scale: Option<f64>,
}

/// A rank's process that has joined, as a tier keeps it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Joined {
    pub incarnation: Incarnation,
    /// The job's version then.
    pub at: Version,
    /// It has only ended what an earlier process may do.
    pub fence_only: bool,
}

/// What a guard says to the update of one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// Update it, then give the number back.
    Go(usize),
    /// It has this version already: its update was done before the server died.
    Done,
    /// Its bytes are not those that were written. Leave it.
    Damaged,
}

/// What a tier does around the update of each block, on the thread that updates it while the block is in its cache.
pub trait Guard: Sync {
    fn begin(&self, block: usize, state: StateRef<'_>) -> Turn;

    /// `image`: the block's new image.
    fn end(&self, block: usize, number: usize, state: StateRef<'_>, image: &[u8]);
}

/// Of a tier that has nothing to do.
pub struct Unguarded;

impl Guard for Unguarded {
    fn begin(&self, _: usize, _: StateRef<'_>) -> Turn {
        Turn::Go(0)
    }

    fn end(&self, _: usize, _: usize, _: StateRef<'_>, _: &[u8]) {}
}

/// Which image of a delayed job's shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageAge {
    Current,
    /// Of the version before.
    Older,
}

/// The state of a server's shards of one job. Shards are numbered as they are owned, in forward order, and updated in
/// that order: a tier may bring in the next ones ahead.
///
/// A closure gets the state, so that a tier can bring it in before and write it back after. An error means that the
/// closure did not run or that its result may not survive: the job cannot go on from this server.
pub trait Tier: Send + Sync {
    fn kind(&self) -> TierKind;

    /// Before a job starts: fills a shard, in any number of calls.
    fn load(&self, owned: usize, load: &mut dyn FnMut(StateMut<'_>)) -> Result<(), Fault>;

    /// Whether several shards can be updated at once, since all are in memory and nothing is to be done around each.
    fn updates_together(&self) -> bool {
        false
    }

    /// Runs the update that makes `version` of these shards, one unless several can be updated at once.
    fn update(
        &self,
        owned: Range<usize>,
        version: Version,
        update: &mut dyn FnMut(Vec<StateMut<'_>>, &dyn Guard),
    ) -> Result<(), Fault>;

    /// Runs what makes `version` of a shard in a step that is skipped: its state stays.
    fn carry(&self, _owned: usize, _version: Version, carry: &mut dyn FnMut()) -> Result<(), Fault> {
        carry();
        Ok(())
    }

    /// Reads a shard as its last update left it.
    fn read(&self, owned: usize, read: &mut dyn FnMut(StateRef<'_>)) -> Result<(), Fault>;

    /// All shards are loaded: keeps this version before it returns.
    fn start(&self, _record: &Record) -> Result<(), Fault> {
        Ok(())
    }

    /// A rank has joined. `over`: it sends again what no decided step needs.
    fn joined(&self, _rank: Rank, _joined: Joined, _over: bool) {}

    /// Returns once whoever has joined is known to the next process too. May wait for a drive.
    fn keep_joined(&self) -> Result<(), Fault> {
        Ok(())
    }

    /// By rank: who had joined an earlier process.
    fn who_joined(&self) -> Vec<Option<Joined>> {
        Vec::new()
    }

    /// Whether contributions must lie in the job's memory, since a process killed after the decision finishes with them.
    fn keeps_contributions(&self) -> bool {
        false
    }

    /// All contributions to an undecided step are summed on a shard; called before anyone is told so.
    fn complete(&self, _owned: usize, _step: Step) {}

    /// A step is decided; called before anyone is told so.
    fn decide(&self, _record: &Record) -> Result<(), Fault> {
        Ok(())
    }

    /// A pause of the durable version has begun or ended: keeps its record with that before it returns.
    fn stand(&self, _record: &Record) -> Result<(), Fault> {
        Ok(())
    }

    /// All shards have the version. Making it durable goes on in the background.
    fn finish(&self, _record: &Record) -> Result<(), Fault> {
        Ok(())
    }

    /// The newest version that a crash cannot take back; None where no step has to wait for it.
    fn durable(&self) -> Option<Version> {
        None
    }

    /// Bytes written to drives since the job was opened.
    fn written_bytes(&self) -> u64 {
        0
    }

    /// Whether the version before the newest is kept whole, so that a job can be opened at it.
    fn keeps_previous(&self) -> bool {
        false
    }

    /// The error after which nothing of this tier may be used.
    fn failure(&self) -> Option<Fault> {
        None
    }

    /// Keeps an image of a shard that was loaded, where images are kept.
    fn store_image(&self, _owned: usize, _age: ImageAge, _image: &[u8]) -> Result<(), Fault> {
        Ok(())
    }

    /// Gives a recovered shard's image; false where it is not kept.
    fn load_image(&self, _owned: usize, _age: ImageAge, _image: &mut [u8]) -> Result<bool, Fault> {
        Ok(false)
    }

    /// Hands bytes of a shard's image of a version to `read`, where images are kept; false where that one is not. Waits for
    /// the drives.
    fn read_image(
        &self,
        _owned: usize,
        _version: Version,
        _bytes: Range<usize>,
        _read: &mut dyn FnMut(&[u8]),
    ) -> Result<bool, Fault> {
        Ok(false)
    }

    /// A load has failed: the images that it stored are of nothing.
    fn forget_images(&self) {}

    /// All that was recovered has been read and is whole: from here on this process owns it.
    fn adopt(&self) -> Result<(), Fault> {
        Ok(())
    }

    /// Removes all that the tier keeps of the job. Nothing may be called after it.
    fn discard(&self) -> Result<(), Fault> {
        Ok(())
    }
}
