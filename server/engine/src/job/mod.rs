//! One job on one server: the state machine, its buffers, its tier, and the compute that moves it.
//!
//! Events may come from any thread. What they ask to be computed is returned as [`Work`], which one compute thread a
//! job performs in order; everything else returns at once or waits with a deadline.

mod buffers;
mod compute;
mod contribution;
mod export;
mod hash;
mod hold;
mod load;
mod need;
mod open;
mod padding;
mod protocol;
mod purpose;
mod read;
mod receive;
mod snapshot;
mod spilled;
mod staging;
mod sum;
mod update;
mod whole_state;
mod window;

use std::{
    collections::VecDeque,
    sync::{
        Arc, Condvar, Mutex, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use longshore_proto::{
    Commit, Fault, Incarnation, JobSpec, Layout, Origin, Placement, ServerId, ShardId, Step, Version,
};

pub use compute::Compute;
pub use contribution::Lent;
pub use load::{CheckpointId, LoadedShard, StoredImages};
pub use open::kept_buffers;
pub use read::{ImageBytes, ImagePlace, ImageRead};
pub use receive::{Admitted, Stored, Writing, check_sum};
pub use snapshot::{Captured, Ended, Snapshot, SnapshotInfo};
pub use staging::Piece;
pub use whole_state::{BlockCopy, CopiedBlock};

use self::{
    buffers::Buffers, load::Load, snapshot::Copying, spilled::SpilledGradients, sum::take_sums,
    window::Window,
};
use crate::{
    admission::Reservation,
    lock,
    memory::SharedFile,
    step::{Machine, Progress, RankProgress, Refusal, Work},
    tier::{Spill, Store},
};

/// Called after every change that somebody may wait for.
pub type Observer = Box<dyn Fn() + Send + Sync>;

/// Wakes everyone who waits for the job to move.
struct Signal {
    /// Goes with the machine's lock.
    changed: Condvar,
    observer: Observer,
}

impl Signal {
    fn send(&self) {
        self.changed.notify_all();
        (self.observer)();
    }
}

pub struct Job {
    spec: Arc<JobSpec>,
    layout: Arc<Layout>,
    placement: Placement,
    server: ServerId,
    owned: Vec<ShardId>,
    machine: Mutex<Machine>,
    buffers: Buffers,
    /// Of a job whose images live on drives.
    window: Option<Window>,
    /// Of a job whose gradients do.
    spilled: Option<SpilledGradients>,
    tier: Store,
    compute: Arc<Compute>,
    load: Mutex<Load>,
    snapshots: Mutex<Vec<Arc<Copying>>>,
    /// Set once when a tier failed: from then on nothing is accepted.
    failed: OnceLock<Fault>,
    pushed_bytes: AtomicU64,
    pulled_bytes: AtomicU64,
    reservation: Reservation,
    disk_bytes: u64,
    /// Of decided steps, when the server before died.
    unfinished: Mutex<Vec<Work>>,
    /// Whether the compute thread has yet to wake those who wait for what it did last.
    owed: AtomicBool,
    /// Last: once the observer is dropped, memory and folders are free again.
    signal: Arc<Signal>,
}

impl Job {
    pub fn spec(&self) -> &JobSpec {
        &self.spec
    }

    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    pub fn server(&self) -> ServerId {
        self.server
    }

    /// This server's shards, in forward order.
    pub fn owned(&self) -> &[ShardId] {
        &self.owned
    }

    pub fn memory_bytes(&self) -> u64 {
        self.reservation.bytes()
    }

    /// Reserved in the state directories.
    pub fn disk_bytes(&self) -> u64 {
        self.disk_bytes
    }

    /// What lives on drives alone; None where nothing of the job lies on any.
    pub fn spill(&self) -> Option<Spill> {
        let spill = match (&self.spilled, self.spills_images()) {
            (Some(_), _) => Spill::All,
            (None, true) => Spill::Images,
            (None, false) => Spill::State,
        };
        self.tier.behind.is_some().then_some(spill)
    }

    /// Written to drives since the job was opened here.
    pub fn written_bytes(&self) -> u64 {
        let gradients = self.spilled.as_ref().map_or(0, SpilledGradients::written_bytes);
        self.tier.behind.as_ref().map_or(0, |behind| behind.written_bytes()) + gradients
    }

    /// Updates that were decided before the server died, and not done. To be performed before any other work.
    pub fn take_unfinished(&self) -> Vec<Work> {
        std::mem::take(&mut *lock(&self.unfinished))
    }

    /// Removes what the tier keeps of the job: it is deleted. Nothing may be asked of it after.
    pub fn discard(&self) -> Result<(), Fault> {
        self.tier.durable.as_ref().map_or(Ok(()), |durable| durable.discard())
    }

    /// The file with all images, if other processes may be given it.
    pub fn shared_images(&self) -> Option<&SharedFile> {
        self.buffers.shared.as_ref()
    }

    pub fn compute(&self) -> &Compute {
        &self.compute
    }

    /// Payload bytes (pushed, pulled) since the job was opened here.
    pub fn traffic(&self) -> (u64, u64) {
        (self.pushed_bytes.load(Ordering::Relaxed), self.pulled_bytes.load(Ordering::Relaxed))
    }

    pub fn progress(&self) -> Progress {
        let mut progress = lock(&self.machine).progress();
        progress.missing = lock(&self.load).missing(&self.owned);
        progress.restoring = self.restoring(&progress.phase);
        progress
    }

    pub fn ranks(&self) -> Vec<RankProgress> {
        lock(&self.machine).ranks()
    }

    pub fn waiting_for(&self) -> Option<String> {
        lock(&self.machine).waiting_for()
    }

    /// Who decided the step that made a version; 0 where that is not known here.
    pub fn decided_by(&self, version: Version) -> Incarnation {
        lock(&self.machine).decided_by(version)
    }

    /// From whose contributions an owned shard's gradient of a step was summed.
    pub fn origin(&self, shard: ShardId, step: Step) -> Result<Origin, Fault> {
        let machine = lock(&self.machine);
        let owned = machine.owned_index(shard)?;
        Ok(machine.origin(owned, step))
    }

    pub fn commits_after(&self, step: Step) -> Option<Vec<Commit>> {
        lock(&self.machine).commits_after(step)
    }

    /// Pauses, resumes, and the loss scale given with the last resume.
    pub fn pauses(&self) -> (u64, u64, f64) {
        lock(&self.machine).pauses()
    }

    /// Performs the oldest of these works, and with a sum the sums right after it. What follows becomes the newest.
    pub fn perform(&self, works: &mut VecDeque<Work>) -> Result<(), Fault> {
        self.check_alive()?;
        let sums = take_sums(works);
        let next = match sums.is_empty().then(|| works.pop_front()).flatten() {
            Some(Work::Update { owned, step }) => self.update(owned, step),
            _ => self.sum(&sums).map(|()| None),
        };
        works.extend(next.map_err(|fault| self.fail(fault))?);
        // Not where drives may have to be waited for first.
        let soon = !works.is_empty() && self.tier.behind.is_none() && lock(&self.snapshots).is_empty();
        if self.owed.swap(soon, Ordering::Relaxed) || !soon {
            self.notify();
        }
        Ok(())
    }

    /// Wakes those who wait for what the compute thread did last. It does this once the other threads compute again: while it
    /// wakes them, and they run on its core, 0.1 ms a shard, the others would have nothing to do: a step of 48 shards took 118.9
    /// ms so, and 120.3 where it woke them first.
    fn notify_owed(&self) {
        if self.owed.swap(false, Ordering::Relaxed) {
            self.notify();
        }
    }

    /// Nothing is accepted any more.
    fn fail(&self, fault: Fault) -> Fault {
        tracing::error!(job = %self.spec.name, %fault, "the job cannot go on from this server");
        let _ = self.failed.set(fault.clone());
        self.notify();
        fault
    }

    /// The failure after which nothing is accepted and nothing moves.
    pub fn check_alive(&self) -> Result<(), Fault> {
        match self.failed.get().cloned().or_else(|| self.tier.behind.as_ref()?.failure()) {
            Some(fault) => Err(fault),
            None => Ok(()),
        }
    }

    fn owned_index(&self, shard: ShardId) -> Result<usize, Refusal> {
        lock(&self.machine).owned_index(shard)
    }

    /// Makes everyone who waits look again.
    pub fn nudge(&self) {
        self.notify();
    }

    /// Whether any contribution to the next undecided step is here.
    pub fn is_step_begun(&self) -> bool {
        lock(&self.machine).is_step_begun()
    }

    fn notify(&self) {
        self.signal.send();
    }
}
