//! A job on one server: its parts, its tier, and the work that the step machine asks for. The server's table of jobs
//! owns each job.
//!
//! Each part is a folder or a file with its own state: [`Protocol`], [`Gradients`], [`Images`] and [`Snapshots`].
//! An act that concerns several of them is a method of [`Job`], in a file by act. Events may come from any
//! thread. An event that asks for a computation returns it as [`Work`](crate::step::Work). A single thread at a time
//! performs a job's works, in order. All other calls return at once or wait with a deadline.

mod broken;
mod compute;
mod decide;
mod gradients;
mod handover;
mod images;
mod load;
mod open;
mod protocol;
mod pull;
mod push;
mod room;
mod share;
mod snapshots;
mod upload;
mod work;

use std::{
    collections::BTreeSet,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use longshore_proto::{Dtype, Formats, JobSpec, Layout, Placement, ServerId, ShardId};

pub use compute::Compute;
pub use gradients::{Gradients, Lent};
pub use handover::{HandedBytes, IMAGE, OLDER_IMAGE};
pub use images::Images;
pub use load::{CheckpointId, LoadedShard, StoredImages};
pub use open::inspect;
pub use protocol::{Observer, Protocol};
pub use pull::{ImageBytes, ImagePlace, Pulled};
pub use push::{Writing, check_sum};
pub use room::room;
pub(crate) use snapshots::PartUnderWay;
pub use snapshots::{
    BlockCopy, Captured, CopiedBlock, Ended, Exported, Piece, Snapshot, SnapshotInfo, Snapshots,
};
pub use upload::UploadChunk;

use self::{load::Load, share::Share};
use crate::{
    admission::Reservation,
    ids::OwnedShard,
    kernels::bytes_per_parameter,
    lock,
    step::Progress,
    tier::{Spill, Store, Taken},
};

/// A job on one server.
pub struct Job {
    share: Arc<Share>,
    pub gradients: Gradients,
    pub images: Images,
    pub snapshots: Snapshots,
    /// Progress of the first state.
    load: Mutex<Load>,
    tier: Store,
    compute: Arc<Compute>,
    reservation: Reservation,
    /// Shards whose memory is free, since other servers own them.
    released: Mutex<BTreeSet<OwnedShard>>,
    disk_bytes: AtomicU64,
    /// Shards whose state has broken here since the job was opened.
    broken: AtomicU64,
    updated_bytes: AtomicU64,
    /// Declared last, so that its observer is dropped last. Once a caller sees that, the job's memory and folders are
    /// free.
    pub protocol: Protocol,
}

impl Job {
    pub fn spec(&self) -> &JobSpec {
        &self.share.spec
    }

    pub fn layout(&self) -> &Layout {
        &self.share.layout
    }

    /// The placement that the job was opened with here, which gives this server's shards.
    pub fn opened_with(&self) -> &Placement {
        &self.share.placement
    }

    /// Returns the number of this server's part of a checkpoint, and the number of parts. Each server that is not given
    /// up writes one, in the order of their numbers.
    pub fn part(&self) -> (u32, u32) {
        let machine = self.protocol.machine();
        let before = machine.members().take_while(|member| *member < self.share.server).count();
        (before as u32, machine.members().count() as u32)
    }

    /// The placement as of the newest decision.
    pub fn placement(&self) -> Placement {
        self.protocol.machine().placement().clone()
    }

    pub fn server(&self) -> ServerId {
        self.share.server
    }

    /// The shards that the job was opened with here, in forward order. Commits may have moved some.
    pub fn opened(&self) -> Vec<ShardId> {
        self.share.opened().map(|owned| self.share.shard(owned)).collect()
    }

    pub fn compute(&self) -> &Compute {
        &self.compute
    }

    /// Returns the bytes reserved in the state directories.
    pub fn disk_bytes(&self) -> u64 {
        self.disk_bytes.load(Ordering::Relaxed)
    }

    pub fn memory_bytes(&self) -> u64 {
        self.reservation.bytes()
    }

    /// Returns the parts of the job that live on drives alone. None for a job without drives.
    pub fn spill(&self) -> Option<Spill> {
        let spill = if self.images.are_spilled() { Spill::All } else { Spill::State };
        self.tier.behind.is_some().then_some(spill)
    }

    /// Returns the bytes written to drives since the job was opened here.
    pub fn written_bytes(&self) -> u64 {
        self.tier.behind.as_ref().map_or(0, |behind| behind.written_bytes()) + self.gradients.written_bytes()
    }

    /// Returns the number of shards by the place where work found them. None if all state is in memory.
    pub fn taken(&self) -> Option<Taken> {
        Some(self.tier.behind.as_ref()?.taken())
    }

    /// Returns the bytes that one update moves through this server's memory: state in and out, gradients in,
    /// images out.
    pub fn update_bytes(&self) -> u64 {
        let released = lock(&self.released);
        let here =
            self.share.all().filter(|owned| !self.share.is_frozen(*owned) && !released.contains(owned));
        here.map(|owned| self.shard_update_bytes(owned)).sum()
    }

    fn shard_update_bytes(&self, owned: OwnedShard) -> u64 {
        let (share, spec) = (&self.share, &self.share.spec);
        let sums = spec.micro_steps > 1 || share.contributors(owned).len() > 1;
        let gradient = if sums { Dtype::F32 } else { spec.gradient_dtype };
        let [gradient, image] = [gradient, spec.image_dtype].map(|dtype| dtype.bytes() as usize);
        let Formats { master, state, .. } = spec.formats;
        let each = bytes_per_parameter(spec.rule, master, state, gradient, image);
        (share.elements(owned) as f64 * each) as u64
    }

    /// Returns the bytes that all updates have moved since the job was opened here, whichever shards it had.
    pub fn updated_bytes(&self) -> u64 {
        self.updated_bytes.load(Ordering::Relaxed)
    }

    /// Returns the bytes of payload that were pushed and pulled since the job was opened here.
    pub fn traffic(&self) -> (u64, u64) {
        let (pushed, pulled) = (&self.gradients.pushed_bytes, &self.images.pulled_bytes);
        (pushed.load(Ordering::Relaxed), pulled.load(Ordering::Relaxed))
    }

    pub fn progress(&self) -> Progress {
        let mut progress = self.protocol.machine().progress();
        let load = lock(&self.load);
        progress.missing = load.missing(&self.share);
        progress.restoring = load.restoring(&progress.phase);
        progress
    }

    /// Deletes the job and its files in the tier. Nothing may be asked of the job afterwards.
    pub fn discard(&self) -> Result<(), longshore_proto::Fault> {
        self.tier.durable.as_ref().map_or(Ok(()), |durable| durable.discard())
    }
}
