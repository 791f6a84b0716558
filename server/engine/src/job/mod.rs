//! One job on one server: the state machine, its buffers, its tier, and the compute that moves it.
//!
//! Events may come from any thread. What they ask to be computed is returned as [`Work`], which one compute thread a
//! job performs in order. Everything else returns at once or waits with a deadline.

mod buffers;
mod compute;
mod contribution;
mod hold;
mod load;
mod need;
mod open;
mod padding;
mod protocol;
mod read;
mod receive;
mod snapshots;
mod spilled;
mod sum;
mod update;
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
pub use snapshots::{BlockCopy, Captured, CopiedBlock, Ended, Piece, Snapshot, SnapshotInfo};

use self::{
    buffers::Buffers, load::Load, snapshots::Snapshots, spilled::SpilledGradients, sum::take_sums,
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
    /// Waits on it hold the machine's lock.
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
    /// Present in a job whose images live on drives.
    window: Option<Window>,
    /// Present in a job whose gradients live on drives.
    spilled: Option<SpilledGradients>,
    tier: Store,
    compute: Arc<Compute>,
    load: Mutex<Load>,
    snapshots: Snapshots,
    /// Set once, when a tier failed. From then on nothing is accepted.
    failed: OnceLock<Fault>,
    pushed_bytes: AtomicU64,
    pulled_bytes: AtomicU64,
    reservation: Reservation,
    disk_bytes: u64,
    /// The updates of steps that an earlier process of this server had decided and not done. The compute thread takes
    /// them first.
    unfinished: Mutex<Vec<Work>>,
    /// The compute thread has finished some work, and has not yet woken the threads that wait for it.
    owed: AtomicBool,
    /// Declared last: once the observer is dropped, memory and folders are free again.
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

    /// How many bytes are reserved in the state directories.
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

    /// How many bytes were written to drives since the job was opened here.
    pub fn written_bytes(&self) -> u64 {
        let gradients = self.spilled.as_ref().map_or(0, SpilledGradients::written_bytes);
        self.tier.behind.as_ref().map_or(0, |behind| behind.written_bytes()) + gradients
    }

    /// The updates that an earlier process of this server had decided and not done. They must be performed before any
    /// other work.
    pub fn take_unfinished(&self) -> Vec<Work> {
        std::mem::take(&mut *lock(&self.unfinished))
    }

    /// Deletes the job: removes what its tier keeps of it. Nothing may be asked of the job afterwards.
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

    /// How many bytes of payload were pushed and pulled since the job was opened here.
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

    /// The rank 0 that decided the step which made a version; 0 where this server does not know it.
    pub fn decided_by(&self, version: Version) -> Incarnation {
        lock(&self.machine).decided_by(version)
    }

    /// The origin of an owned shard's gradient of a step.
    pub fn origin(&self, shard: ShardId, step: Step) -> Result<Origin, Fault> {
        let machine = lock(&self.machine);
        let owned = machine.owned_index(shard)?;
        Ok(machine.origin(owned, step))
    }

    pub fn commits_after(&self, step: Step) -> Option<Vec<Commit>> {
        lock(&self.machine).commits_after(step)
    }

    /// The numbers of pauses and resumes, and the loss scale given with the last resume.
    pub fn pauses(&self) -> (u64, u64, f64) {
        lock(&self.machine).pauses()
    }

    /// Performs the oldest of these works; with a sum also the sums right after it. The work that follows is appended
    /// as the newest.
    pub fn perform(&self, works: &mut VecDeque<Work>) -> Result<(), Fault> {
        self.check_alive()?;
        let sums = take_sums(works);
        let next = match sums.is_empty().then(|| works.pop_front()).flatten() {
            Some(Work::Update { owned, step }) => self.update(owned, step),
            _ => self.sum(&sums).map(|()| None),
        };
        works.extend(next.map_err(|fault| self.fail(fault))?);
        // This is not done where drives may have to be waited for first.
        let soon = !works.is_empty() && self.tier.behind.is_none() && self.snapshots.is_empty();
        if self.owed.swap(soon, Ordering::Relaxed) || !soon {
            self.notify();
        }
        Ok(())
    }

    /// Wakes the threads that wait for the last finished work. The compute thread calls this only once it has given
    /// the update threads their next blocks. Waking takes 0.1 ms a shard, and the woken threads run on the compute
    /// thread's core; if they were woken first, the update threads would be idle meanwhile (120.3 ms for a step of 48
    /// shards, instead of 118.9).
    fn notify_owed(&self) {
        if self.owed.swap(false, Ordering::Relaxed) {
            self.notify();
        }
    }

    /// Fails the job: from here on it accepts nothing.
    fn fail(&self, fault: Fault) -> Fault {
        tracing::error!(job = %self.spec.name, %fault, "the job cannot go on from this server");
        let _ = self.failed.set(fault.clone());
        self.notify();
        fault
    }

    /// The failure after which the job accepts nothing and does not move.
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
