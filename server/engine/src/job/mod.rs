//! A job on one server: its step machine, its memory, its tier, and the work that the machine asks for.
//!
//! Events may come from any thread. An event that asks for a computation returns it as [`Work`]. Each job has
//! one compute thread, which performs the works in order. All other calls return at once or wait with a
//! deadline.

mod compute;
mod gradients;
mod hold;
mod images;
mod left_out;
mod load;
mod need;
mod open;
mod padding;
mod protocol;
mod snapshots;
mod space;
mod update;
mod upload;

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use longshore_proto::{
    Commit, Dtype, Fault, Formats, Incarnation, JobSpec, Layout, Origin, Placement, ServerId, ShardId, Step,
    Version,
};

pub use compute::Compute;
pub use gradients::{Admitted, Lent, Stored, Writing, check_sum};
pub use images::{ImageBytes, ImagePlace, ImageRead, Pulled};
pub use load::{CheckpointId, LoadedShard, StoredImages};
pub use open::kept_buffers;
pub use protocol::Observer;
pub(crate) use snapshots::PartUnderWay;
pub use snapshots::{BlockCopy, Captured, CopiedBlock, Ended, Exported, Piece, Snapshot, SnapshotInfo};
pub use upload::UploadChunk;

use self::{
    gradients::{Gradients, take_sums},
    images::Images,
    load::Load,
    protocol::Protocol,
    snapshots::{PartsUnderWay, Snapshots},
};
use crate::{
    admission::Reservation,
    ids::{OwnedShard, OwnedShards},
    kernels::bytes_per_parameter,
    lock,
    memory::{SharedFile, float::Standard},
    step::{Progress, RankProgress, Refusal, Work},
    tier::{Spill, Store, Taken},
};

/// A job on one server: its protocol, gradients, images and snapshots, its tier, and the threads that
/// compute.
pub struct Job {
    spec: Arc<JobSpec>,
    layout: Arc<Layout>,
    placement: Placement,
    server: ServerId,
    owned: Vec<ShardId>,
    gradients: Gradients,
    images: Images,
    tier: Store,
    compute: Arc<Compute>,
    load: Mutex<Load>,
    snapshots: Snapshots,
    parts: Arc<PartsUnderWay>,
    pushed_bytes: AtomicU64,
    pulled_bytes: AtomicU64,
    reservation: Reservation,
    disk_bytes: u64,
    /// Declared last, so that the observer in it is dropped last. A caller that sees the observer dropped
    /// knows that the job's memory and folders are free.
    protocol: Protocol,
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

    /// Returns the bytes reserved in the state directories.
    pub fn disk_bytes(&self) -> u64 {
        self.disk_bytes
    }

    /// Returns true if images live on drives, so that reading one may take a drive's time.
    pub fn spills_images(&self) -> bool {
        self.images.are_spilled()
    }

    /// Returns true if pulls of a shard copy the tier's data: spilled images, and frozen weights.
    pub fn reads_state(&self, shard: ShardId) -> bool {
        self.images.are_spilled() || self.layout.is_frozen(shard)
    }

    /// The owned shards that are trained.
    pub(crate) fn trained(&self) -> impl Iterator<Item = OwnedShard> + use<'_> {
        OwnedShards::all(self.owned.len()).filter(|&owned| !self.is_frozen(owned))
    }

    fn is_frozen(&self, owned: OwnedShard) -> bool {
        self.layout.is_frozen(self.owned[owned.index()])
    }

    /// Returns which parts of the job live on drives alone. None for a job that keeps nothing on drives.
    pub fn spill(&self) -> Option<Spill> {
        let spill = if self.images.are_spilled() { Spill::All } else { Spill::State };
        self.tier.behind.is_some().then_some(spill)
    }

    /// Returns the bytes written to drives since the job was opened here.
    pub fn written_bytes(&self) -> u64 {
        self.tier.behind.as_ref().map_or(0, |behind| behind.written_bytes()) + self.gradients.written_bytes()
    }

    /// Returns where shards were when work needed them. None if all state is in memory.
    pub fn taken(&self) -> Option<Taken> {
        Some(self.tier.behind.as_ref()?.taken())
    }

    /// Returns the bytes that one update moves through this server's memory: state in and out, gradients in,
    /// images out.
    pub fn update_bytes(&self) -> u64 {
        let spec = &*self.spec;
        let trained = self.owned.iter().filter(|&&shard| !self.layout.is_frozen(shard));
        let bytes = |shard: &ShardId| {
            let sums = spec.micro_steps > 1 || self.layout.contributors(*shard).len() > 1;
            let gradient = if sums { Dtype::F32 } else { spec.gradient_dtype };
            let [gradient, image] = [gradient, spec.image_dtype].map(|dtype| dtype.bytes() as usize);
            let Formats { master, state, .. } = spec.formats;
            self.layout.shard_len(*shard) as f64
                * bytes_per_parameter(spec.rule, master, state, gradient, image)
        };
        trained.map(bytes).sum::<f64>() as u64
    }

    /// Returns the unfinished work: updates of steps that were decided before an earlier process of this
    /// server died. Perform them before any other work.
    pub fn take_unfinished(&self) -> Vec<Work> {
        self.protocol.take_unfinished()
    }

    /// Deletes the job and its files in the tier. Nothing may be asked of the job afterwards.
    pub fn discard(&self) -> Result<(), Fault> {
        self.tier.durable.as_ref().map_or(Ok(()), |durable| durable.discard())
    }

    /// The file with all images, if other processes may be given it.
    pub fn shared_images(&self) -> Option<&SharedFile> {
        self.images.shared()
    }

    pub fn compute(&self) -> &Compute {
        &self.compute
    }

    /// Returns the bytes of payload that were pushed and pulled since the job was opened here.
    pub fn traffic(&self) -> (u64, u64) {
        (self.pushed_bytes.load(Ordering::Relaxed), self.pulled_bytes.load(Ordering::Relaxed))
    }

    /// Returns the parts of checkpoints that are being written, for the writer of a part.
    pub(crate) fn parts(&self) -> &Arc<PartsUnderWay> {
        &self.parts
    }

    /// Returns the written bytes of checkpoints in progress, and their total. None if no checkpoint is in
    /// progress.
    pub fn checkpoint_progress(&self) -> Option<(u64, u64)> {
        self.parts.now()
    }

    pub fn progress(&self) -> Progress {
        let mut progress = self.protocol.machine().progress();
        progress.missing = lock(&self.load).missing(&self.owned, self.spec.rule);
        progress.restoring = self.restoring(&progress.phase);
        progress
    }

    pub fn ranks(&self) -> Vec<RankProgress> {
        self.protocol.machine().ranks()
    }

    pub fn waiting_for(&self) -> Option<String> {
        self.protocol.machine().waiting_for()
    }

    /// Returns the incarnation of the rank 0 that decided a version's step; 0 if this server does not know
    /// it.
    pub fn decided_by(&self, version: Version) -> Incarnation {
        self.protocol.machine().decided_by(version)
    }

    /// The origin of an owned shard's gradient of a step.
    pub fn origin(&self, shard: ShardId, step: Step) -> Result<Origin, Fault> {
        let machine = self.protocol.machine();
        let owned = machine.owned_index(shard)?;
        Ok(machine.origin(owned, step))
    }

    pub fn commits_after(&self, step: Step) -> Option<Vec<Commit>> {
        self.protocol.machine().commits_after(step)
    }

    /// The numbers of pauses and resumes, and the loss scale given with the last resume.
    pub fn pauses(&self) -> (u64, u64, f64) {
        self.protocol.machine().pauses()
    }

    /// Performs the oldest of these works. If it is a sum, several sums right behind it are performed with
    /// it. A further work that it asks for is put at the end.
    pub fn perform(&self, works: &mut VecDeque<Work>) -> Result<(), Fault> {
        self.check_alive()?;
        let _standard = Standard::enter();
        let sums = take_sums(works);
        let next = match sums.is_empty().then(|| works.pop_front()).flatten() {
            Some(Work::Update { owned, step }) => self.update(owned, step),
            _ => self.sum(&sums).map(|()| None),
        };
        works.extend(next.map_err(|fault| self.fail(fault))?);
        // Waiting threads are woken once the next work has begun, if it begins soon. A work that may first
        // wait for drives or for a snapshot does not begin soon.
        let soon = !works.is_empty() && self.tier.behind.is_none() && self.snapshots.len() == 0;
        if self.protocol.owe(soon) || !soon {
            self.notify();
        }
        Ok(())
    }

    /// Wakes the threads that wait for the last finished work; see [`Protocol::notify_owed`].
    fn notify_owed(&self) {
        self.protocol.notify_owed();
    }

    /// Fails the job: from here on it accepts nothing.
    pub fn fail(&self, fault: Fault) -> Fault {
        tracing::error!(job = %self.spec.name, %fault, "the job cannot go on from this server");
        self.protocol.fail(&fault);
        self.notify();
        fault
    }

    /// Returns the job's failure, if it has failed. A failed job accepts nothing and performs no work.
    pub fn check_alive(&self) -> Result<(), Fault> {
        match self.protocol.failure().or_else(|| self.tier.behind.as_ref()?.failure()) {
            Some(fault) => Err(fault),
            None => Ok(()),
        }
    }

    fn owned_index(&self, shard: ShardId) -> Result<OwnedShard, Refusal> {
        self.protocol.machine().owned_index(shard)
    }

    /// Makes all waiting threads look again.
    pub fn nudge(&self) {
        self.notify();
    }

    /// Returns true if this server has received any contribution to the next undecided step.
    pub fn is_step_begun(&self) -> bool {
        self.protocol.machine().is_step_begun()
    }

    /// Returns the number of exports, checkpoints and state hashes in progress.
    pub fn copies(&self) -> usize {
        self.snapshots.len()
    }

    fn notify(&self) {
        self.protocol.notify();
    }
}
