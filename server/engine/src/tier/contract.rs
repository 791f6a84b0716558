//! The contract between a tier and a job: a core that every tier has, and optional objects. A job owns its store. The
//! compute thread updates; calls read and load on their own threads.
//!
//! Shards are updated in forward order, so that a tier may prefetch the next ones. After a failed request, a crash may
//! undo writes that seemed done. So an error ends the job on this server.

use std::{ops::Range, sync::Arc};

use longshore_proto::{Fault, Rank, Step, Version};

use super::{
    gradients::GradientStore,
    state::{Guarded, StateMut, StateRef},
};
use crate::{
    ids::OwnedShard,
    memory::Slab,
    record::{Joined, KeptShard, Record},
};

/// The state of a server's shards of one job. The job asks for these objects, and never for the kind of tier.
pub struct Store {
    pub state: Arc<dyn Tier>,
    pub durable: Option<Arc<dyn Durable>>,
    pub behind: Option<Arc<dyn WriteBehind>>,
    pub kept: Option<Arc<dyn KeptMemory>>,
    pub images: Option<Arc<dyn ImageStore>>,
    /// Present if gradients that are not lent go to drives.
    pub gradients: Option<Arc<dyn GradientStore>>,
}

impl Store {
    pub(super) fn of(state: Arc<dyn Tier>) -> Store {
        Store { state, durable: None, behind: None, kept: None, images: None, gradients: None }
    }
}

/// An opened store, and the parts of the job that the tier has kept.
pub struct Opened {
    pub store: Store,
    /// The memory for the job's buffers, if the tier keeps them.
    pub buffers: Option<Slab>,
    pub recovered: Recovered,
}

#[expect(clippy::large_enum_variant, reason = "there is one a job, when it is opened")]
pub enum Recovered {
    Nothing,
    /// A whole version. Every byte must be read, and the version adopted, before the next step.
    Version(Record),
    /// All memory of an earlier process, which may have been killed at any instant.
    Interrupted(Interrupted),
}

/// A job whose process was killed at any instant.
pub struct Interrupted {
    /// The records of the last one or two decided steps, oldest first.
    pub records: Vec<Record>,
    /// Shards by place. None means that another server has the shard.
    pub shards: Vec<Option<KeptShard>>,
}

/// The core, which every tier has. State is handed to closures, so that a tier can read the state before a call and
/// write it afterwards.
pub trait Tier: Send + Sync {
    /// Fills a shard before the job starts, in any number of calls.
    fn load(&self, owned: OwnedShard, load: &mut dyn FnMut(StateMut<'_>)) -> Result<(), Fault>;

    fn read(&self, owned: OwnedShard, read: &mut dyn FnMut(StateRef<'_>)) -> Result<(), Fault>;

    /// Hands bytes of one array to `read`. A tier on drives reads only the blocks that contain them.
    fn read_part(
        &self,
        owned: OwnedShard,
        array: usize,
        bytes: Range<usize>,
        read: &mut dyn FnMut(&[u8]),
    ) -> Result<(), Fault> {
        self.read(owned, &mut |state| read(&state.arrays[array][bytes.clone()]))
    }

    /// Hands bytes of a frozen shard's weights to `read`, in order, in one call or several, once the job has
    /// started. A tier on drives reads only the parts that contain them.
    fn read_frozen(
        &self,
        owned: OwnedShard,
        bytes: Range<usize>,
        read: &mut dyn FnMut(&[u8]),
    ) -> Result<(), Fault> {
        self.read_part(owned, 0, bytes, read)
    }

    /// Announces a later read of these bytes. Returns at once. A tier on drives prefetches them as far as it has room.
    fn read_frozen_ahead(&self, _: OwnedShard, _: Range<usize>) {}

    /// Reserves space for a shard that shall move here. The caller reserves the memory.
    fn make_room(&self, _: OwnedShard) -> Result<(), Fault> {
        Ok(())
    }

    /// Frees memory and space of a shard that another server owns. The shard may be loaded again at any time.
    fn release(&self, _: OwnedShard) {}

    /// Notes that a shard's state of `version` is whole, and its images from version `oldest` on. The tier takes
    /// checksums, with which the next updates compare the state.
    fn seal(&self, _: OwnedShard, _version: Version, _oldest: Version) -> Result<(), Fault> {
        Ok(())
    }

    /// Largest number of shards that one call of [`Tier::update`] takes. More than one where the tier has nothing to do
    /// before and after a shard's update.
    fn most_at_once(&self) -> usize {
        1
    }

    /// Runs the updates that make `version` of trained shards as one.
    fn update(
        &self,
        run: &[OwnedShard],
        version: Version,
        update: &mut dyn FnMut(Vec<Guarded<'_>>),
    ) -> Result<(), Fault>;
}

/// A tier gives this if the server's next process finds the state.
pub trait Durable: Send + Sync {
    /// Keeps the first version, of which all shards are loaded and sealed. The version is stored before the call
    /// returns.
    fn start(&self, record: &Record) -> Result<(), Fault>;

    /// Keeps a decision on a step. Called before any caller hears of the decision.
    fn decide(&self, record: &Record) -> Result<(), Fault>;

    /// Keeps a pause at the current version, or its end. The version's record is stored with the new standing before
    /// the call returns.
    fn stand(&self, record: &Record) -> Result<(), Fault>;

    /// Keeps another placement at the current version. Before the call returns, the version's record is stored with
    /// that placement. So is each shard that was fetched for the placement.
    fn place(&self, record: &Record) -> Result<(), Fault>;

    /// Notes that a rank has joined. With `over`, every undecided step begins anew, so the tier must forget sums of
    /// these steps.
    fn joined(&self, rank: Rank, joined: Joined, over: bool);

    /// Returns once the next process would find all joins. May wait for a drive.
    fn keep_joined(&self) -> Result<(), Fault>;

    /// Returns each rank's process that had joined before this server started. Empty if none is known.
    fn who_joined(&self) -> Vec<Option<Joined>>;

    /// Removes all of the job's files in the tier. The last call.
    fn discard(&self) -> Result<(), Fault>;
}

/// Number of shards by place, when work needed them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// In DRAM, where they stay.
    pub resident: u64,
    /// In DRAM, read ahead.
    pub ahead: u64,
    /// Still on a drive, so that work waited.
    pub waited: u64,
}

/// A tier gives this if it writes versions in the background. A version is written whole before the next is decided.
/// The version before the newest is kept, and a job can be opened at it.
pub trait WriteBehind: Send + Sync {
    /// Takes over the recovered state. The caller has read and verified all of it.
    fn adopt(&self) -> Result<(), Fault>;

    /// Notes that all shards have the version. The tier makes the version durable in the background.
    fn finish(&self, record: &Record) -> Result<(), Fault>;

    /// The newest version that a crash cannot take back.
    fn durable(&self) -> Version;

    /// Returns the bytes written to drives since the job was opened.
    fn written_bytes(&self) -> u64;

    /// Returns the number of shards by the place where work found them, since the job was opened.
    fn taken(&self) -> Taken;

    fn failure(&self) -> Option<Fault>;
}

/// Loss scale of a step's gradients, and version behind its first micro-step, as far as known.
pub(super) type ComputedWith = (Option<f64>, Option<Version>);

/// A tier gives this if the next process finds images, contributions and sums as they were. The next process
/// finishes the steps that this one had decided.
pub trait KeptMemory: Send + Sync {
    /// Notes the loss scale and the version with which a sum of a step was computed. Called before
    /// [`KeptMemory::complete`].
    fn settle(&self, step: Step, computed_with: ComputedWith);

    /// Returns the steps that were settled last.
    fn settled(&self) -> Vec<(Step, ComputedWith)>;

    /// Notes that all contributions to an undecided step are summed on a shard. Called before any caller hears of the
    /// sum.
    fn complete(&self, owned: OwnedShard, step: Step);

    /// Runs `carry`, which copies a shard's image for `version`, made by a skipped step. The state stays.
    fn carry(&self, owned: OwnedShard, version: Version, carry: &mut dyn FnMut());

    /// Compares a kept image with its checksums.
    fn check_image(&self, owned: OwnedShard, version: Version, image: &[u8]) -> Result<(), Fault>;
}

/// The age of a shard's image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageAge {
    Current,
    /// The image of the version before.
    Older,
}

/// A tier gives this if it stores images beside the state. Updates store them with the state. These calls store, read
/// and forget images outside of updates.
pub trait ImageStore: Send + Sync {
    /// Keeps blocks of an image of a shard that was loaded or fetched. The first block starts at byte `start` of the
    /// image.
    fn store(&self, owned: OwnedShard, age: ImageAge, start: usize, blocks: &[u8]) -> Result<(), Fault>;

    /// Reads a recovered shard's image. Returns false if it is not kept.
    fn load(&self, owned: OwnedShard, age: ImageAge, image: &mut [u8]) -> Result<bool, Fault>;

    /// Hands bytes of a shard's image of a version to `read`, in order, in one call or several. Returns false if the
    /// image is no longer kept; bytes given to `read` until then do not count. Waits for the drives.
    fn read(
        &self,
        owned: OwnedShard,
        version: Version,
        bytes: Range<usize>,
        read: &mut dyn FnMut(&[u8]),
    ) -> Result<bool, Fault>;

    /// Announces a later read of bytes of a shard's image, of a version that the shard has. Returns at once, and
    /// prefetches as far as there is room.
    fn read_ahead(&self, owned: OwnedShard, version: Version, bytes: Range<usize>);

    /// Forgets the images that a failed load has stored.
    fn forget(&self);
}
