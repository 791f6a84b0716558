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
mod open;
mod padding;
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
    time::Instant,
};

use longshore_proto::{
    Commit, Fault, FaultKind, Incarnation, JobSpec, Layout, Origin, Placement, Rank, ServerId, ShardId, Step,
    TierKind, Version, commit::check_pause_reason,
};

pub use compute::Compute;
pub use contribution::Lent;
pub use load::{CheckpointId, LoadedShard, StoredImages};
pub use open::kept_buffers;
pub use read::{ImageBytes, ImagePlace, ImageRead};
pub use receive::{Admitted, Stored, Writing, check_sum};
pub use snapshot::{Captured, Ended, Snapshot, SnapshotInfo};
pub(crate) use spilled::need as spilled_need;
pub use staging::Piece;
pub use whole_state::{BlockCopy, CopiedBlock};
pub(crate) use window::need as window_need;

use self::{
    buffers::Buffers, load::Load, snapshot::Copying, spilled::SpilledGradients, sum::take_sums,
    window::Window,
};
use crate::{
    admission::Reservation,
    lock,
    memory::SharedFile,
    step::{Admission, Machine, Progress, RankProgress, Refusal, Work},
    tier::{Joined, Record, Spill, Tier},
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
    tier: Box<dyn Tier>,
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

    /// What of a job of tier `nvme` lives on the drives alone; None on other tiers.
    pub fn spill(&self) -> Option<Spill> {
        let spill = match (&self.spilled, self.spills_images()) {
            (Some(_), _) => Spill::All,
            (None, true) => Spill::Images,
            (None, false) => Spill::State,
        };
        (self.spec.tier == TierKind::Nvme).then_some(spill)
    }

    /// Written to drives since the job was opened here.
    pub fn written_bytes(&self) -> u64 {
        let gradients = self.spilled.as_ref().map_or(0, SpilledGradients::written_bytes);
        self.tier.written_bytes() + gradients
    }

    /// Checks that the job may be opened again at `version`, for a rank 0 that will join as `incarnation`. True when it
    /// is there already.
    pub fn check_step_back(&self, incarnation: Incarnation, version: Version) -> Result<bool, Fault> {
        let machine = lock(&self.machine);
        machine.check_newest(Rank(0), incarnation)?;
        let current = machine.version();
        if version == current {
            return Ok(true);
        }
        if version.0 + 1 != current.0 || !self.tier.keeps_previous() {
            let limit = format!("{current}, or the version before where the tier keeps it");
            let remedy = "restore a checkpoint: the servers have no version in common";
            return Err(Fault::new(FaultKind::Precondition, "version", version.0, limit, remedy));
        }
        Ok(false)
    }

    /// The newest version that a crash of this server cannot take back, or with the memory tier the newest one: what
    /// rank 0 waits for before it commits the next step, and workers before they let go of their gradients.
    pub fn durable(&self) -> Version {
        let version = lock(&self.machine).version();
        self.tier.durable().map_or(version, |durable| durable.min(version))
    }

    /// Updates that were decided before the server died, and not done. To be performed before any other work.
    pub fn take_unfinished(&self) -> Vec<Work> {
        std::mem::take(&mut *lock(&self.unfinished))
    }

    /// Removes what the tier keeps of the job: it is deleted. Nothing may be asked of it after.
    pub fn discard(&self) -> Result<(), Fault> {
        self.tier.discard()
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

    /// Ends what earlier processes of a rank may do, before what the new one reads here can be acted on. The rank may be told
    /// once [`Job::keep_joined`] has returned.
    pub fn fence(&self, rank: Rank, incarnation: Incarnation) -> Result<(), Fault> {
        self.check_alive()?;
        let mut machine = lock(&self.machine);
        if machine.fence(rank, incarnation)? {
            let joined = Joined { incarnation, at: machine.version(), fence_only: true };
            self.tier.joined(rank, joined, false);
        }
        drop(machine);
        self.notify();
        Ok(())
    }

    /// False while the rank's earlier process is still being written for; ask again after a change. The rank may be told
    /// once [`Job::keep_joined`] has returned.
    pub fn join(&self, rank: Rank, incarnation: Incarnation) -> Result<bool, Fault> {
        self.check_alive()?;
        let mut machine = lock(&self.machine);
        let before = machine.has_joined(rank, incarnation);
        let joined = machine.join(rank, incarnation)? != Admission::Busy;
        if joined && !before {
            // Under the lock: what is sent again is written over what was there.
            let joined = Joined { incarnation, at: machine.version(), fence_only: false };
            self.tier.joined(rank, joined, self.spec.world_size == 1);
            self.give_back_unneeded(&machine, rank);
        }
        drop(machine);
        self.notify();
        Ok(joined)
    }

    /// Returns once no crash of this server makes it forget who has joined. Waits for a drive where the tier has one.
    pub fn keep_joined(&self) -> Result<(), Fault> {
        self.tier.keep_joined()
    }

    /// Checks that a caller is the rank's living process.
    pub fn check_rank(&self, rank: Rank, incarnation: Incarnation) -> Result<(), Fault> {
        lock(&self.machine).check_rank(rank, incarnation).map_err(Fault::from)
    }

    pub fn leave(&self, rank: Rank, incarnation: Incarnation) -> Result<(), Fault> {
        lock(&self.machine).leave(rank, incarnation)?;
        self.notify();
        Ok(())
    }

    /// Pauses the job, and has its tier keep that. False while the version is not durable; ask again once it is.
    pub fn pause(&self, incarnation: Incarnation, reason: &str) -> Result<bool, Fault> {
        check_pause_reason("reason", reason)?;
        self.stand(|machine| machine.pause(incarnation, reason.to_string()))
    }

    /// Ends the pause that began at `version`, or the one in force, and has its tier keep that. False as of [`Job::pause`].
    pub fn resume(&self, version: Option<Version>, loss_scale: f64) -> Result<bool, Fault> {
        self.stand(|machine| machine.resume(version, loss_scale))
    }

    /// Changes what is said of the current version, once its record is there to be written again.
    fn stand(&self, change: impl FnOnce(&mut Machine) -> Result<bool, Refusal>) -> Result<bool, Fault> {
        self.check_alive()?;
        let mut machine = lock(&self.machine);
        if self.tier.durable().is_some_and(|durable| durable < machine.version()) {
            return Ok(false);
        }
        if change(&mut machine)? {
            // Under the lock: nobody may learn of it before the tier has it, and no decision come between.
            self.tier.stand(&machine.record()).inspect_err(|fault| {
                let _ = self.failed.set(fault.clone());
            })?;
        }
        drop(machine);
        self.notify();
        Ok(true)
    }

    /// Decides a step, whatever contributions it was made from. The flag says that it was decided so before.
    pub fn commit(&self, incarnation: Incarnation, commit: Commit) -> Result<(bool, Option<Work>), Fault> {
        self.commit_from(incarnation, commit, Origin::UNKNOWN)
    }

    /// Decides a step, if the contributions here are those that the decision was made from.
    pub fn commit_from(
        &self,
        incarnation: Incarnation,
        commit: Commit,
        origin: Origin,
    ) -> Result<(bool, Option<Work>), Fault> {
        self.check_alive()?;
        commit.validate(&self.spec)?;
        let mut machine = lock(&self.machine);
        let before = machine.version();
        if let Some(durable) = self.tier.durable().filter(|&durable| durable < before)
            && commit.step == before.next_step()
        {
            return Err(Refusal::NotDurable { step: commit.step, durable }.into());
        }
        let step = commit.step;
        let work = machine.commit(incarnation, commit, origin)?;
        let duplicate = machine.version() == before;
        if !duplicate {
            self.tell_snapshots(&machine);
            // Under the lock: nobody may learn of the decision before the tier has it.
            self.record_of(&machine, step, |record| self.tier.decide(record))?;
            if self.owned.is_empty() {
                self.record_of(&machine, step, |record| self.tier.finish(record))?;
            }
        }
        drop(machine);
        self.notify();
        Ok((duplicate, work))
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
        let soon =
            !works.is_empty() && self.tier.kind() != TierKind::Nvme && lock(&self.snapshots).is_empty();
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

    /// Hands a decided step's record to the tier. An error is the end of the job here.
    fn record_of(
        &self,
        machine: &Machine,
        step: Step,
        keep: impl FnOnce(&Record) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        let (commit, applied) = machine.decision(step).expect("a commit is kept until its updates are done");
        let kept = keep(&Record::new(step.version(), applied, Some(commit.clone())));
        kept.inspect_err(|fault| {
            let _ = self.failed.set(fault.clone());
        })
    }

    /// The failure after which nothing is accepted and nothing moves.
    pub fn check_alive(&self) -> Result<(), Fault> {
        match self.failed.get().cloned().or_else(|| self.tier.failure()) {
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

    /// Waits until every decided update is done.
    pub fn settle(&self, deadline: Instant) -> Result<(), Fault> {
        let remedy = "the server is overloaded: raise the deadline or give it more threads";
        self.wait_until(deadline, "version", remedy, |machine| {
            let settled = machine.is_settled().then_some(());
            settled.ok_or_else(|| format!("being updated to {}", machine.version().0))
        })
    }

    /// Waits for a condition of the machine, or says at the deadline what is there instead.
    fn wait_until(
        &self,
        deadline: Instant,
        field: &str,
        remedy: &str,
        check: impl Fn(&Machine) -> Result<(), String>,
    ) -> Result<(), Fault> {
        let mut machine = lock(&self.machine);
        while let Err(found) = check(&machine) {
            self.check_alive()?;
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Fault::new(FaultKind::Deadline, field, found, "there in time", remedy));
            }
            machine = self
                .signal
                .changed
                .wait_timeout(machine, left)
                .unwrap_or_else(|poison| poison.into_inner())
                .0;
        }
        Ok(())
    }
}
