//! The contract between a tier and a job: a core that every tier has, and objects beside it that a tier may
//! give.
//!
//! Shards are updated in forward order, so that a tier may prefetch the next ones. After an error the request
//! was not done or may not survive. The job cannot go on from this server then.

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

/// The state of a server's shards of one job. The objects that are there decide the job's behaviour, and no
/// code asks for the kind of tier.
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

/// An opened store, and the parts of the job that the tier had kept.
pub struct Opened {
    pub store: Store,
    /// The memory for the job's buffers, if the tier keeps them.
    pub buffers: Option<Slab>,
    pub recovered: Recovered,
}

#[expect(clippy::large_enum_variant, reason = "there is one a job, when it is opened")]
pub enum Recovered {
    Nothing,
    /// A whole version. All of it must be read, and adopted, before the next step.
    Version(Record),
    /// All memory of an earlier process, which may have been killed at any instant.
    Interrupted(Interrupted),
}

/// A job whose process was killed at any instant.
pub struct Interrupted {
    /// The records of the last one or two decided steps, oldest first.
    pub records: Vec<Record>,
    /// By place. None: another server has the shard.
    pub shards: Vec<Option<KeptShard>>,
}

/// The core, which every tier has. State is handed to closures, so that a tier can read it before and write
/// it back after.
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

    /// Announces that these bytes will be asked for soon. Returns at once. A tier on drives prefetches them
    /// as far as it has room.
    fn read_frozen_ahead(&self, _: OwnedShard, _: Range<usize>) {}

    /// Reserves space for a shard that shall come to this server. Its memory is the caller's to reserve.
    fn make_room(&self, _: OwnedShard) -> Result<(), Fault> {
        Ok(())
    }

    /// Frees memory and space of a shard that another server owns by now. Its next load may come at any time.
    fn release(&self, _: OwnedShard) {}

    /// A shard's state of `version` is whole now, and its images from `oldest` on. Takes checksums, which the next
    /// updates compare.
    fn seal(&self, _: OwnedShard, _version: Version, _oldest: Version) -> Result<(), Fault> {
        Ok(())
    }

    /// Most shards that one call of [`Tier::update`] takes. More than one where the tier has nothing to do around a
    /// shard's update.
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
    /// All shards are loaded and sealed. The tier keeps this version before it returns.
    fn start(&self, record: &Record) -> Result<(), Fault>;

    /// A step is decided. Called before anyone is told so.
    fn decide(&self, record: &Record) -> Result<(), Fault>;

    /// A pause at the current version has begun or ended. Before it returns, the tier keeps the version's record with
    /// the new standing.
    fn stand(&self, record: &Record) -> Result<(), Fault>;

    /// The placement has changed at the current version. Before it returns, the tier keeps the version's record with it, and
    /// each shard that was fetched for it.
    fn place(&self, record: &Record) -> Result<(), Fault>;

    /// A rank has joined. If `over`, it starts every undecided step over, so sums of those steps must be
    /// forgotten.
    fn joined(&self, rank: Rank, joined: Joined, over: bool);

    /// Returns once the next process, too, would know who has joined. May wait for a drive.
    fn keep_joined(&self) -> Result<(), Fault>;

    /// Returns each rank's process that had joined before this server started. Empty if none is known.
    fn who_joined(&self) -> Vec<Option<Joined>>;

    /// Removes all of the job's files in the tier. Nothing may be called after it.
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

/// A tier gives this if it writes versions while the job goes on. A version is written whole before the next
/// is decided. The version before the newest is kept, so that a job can be opened at it.
pub trait WriteBehind: Send + Sync {
    /// All of the recovered state has been read and is whole. From here on it belongs to this process.
    fn adopt(&self) -> Result<(), Fault>;

    /// All shards have the version. Making it durable goes on in the background.
    fn finish(&self, record: &Record) -> Result<(), Fault>;

    /// The newest version that a crash cannot take back.
    fn durable(&self) -> Version;

    /// Returns the bytes written to drives since the job was opened.
    fn written_bytes(&self) -> u64;

    /// Returns where shards were when work needed them, since the job was opened.
    fn taken(&self) -> Taken;

    fn failure(&self) -> Option<Fault>;
}

/// Loss scale of a step's gradients, and the version that its first micro-step was computed with, as far as known.
pub(super) type ComputedWith = (Option<f64>, Option<Version>);

/// A tier gives this if the next process finds images, contributions and sums as they were. The next process
/// finishes the steps that this one had decided.
pub trait KeptMemory: Send + Sync {
    /// A sum of a step was computed with these. Called before [`KeptMemory::complete`].
    fn settle(&self, step: Step, computed_with: ComputedWith);

    /// Returns the steps that were settled last.
    fn settled(&self) -> Vec<(Step, ComputedWith)>;

    /// All contributions to an undecided step are summed on a shard. Called before anyone is told so.
    fn complete(&self, owned: OwnedShard, step: Step);

    /// Runs `carry`, which makes `version` of a shard in a skipped step: the image is copied and the state stays.
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
    /// Keeps blocks of an image of a shard that was loaded or fetched. The first one starts at byte `start`.
    fn store(&self, owned: OwnedShard, age: ImageAge, start: usize, blocks: &[u8]) -> Result<(), Fault>;

    /// Reads a recovered shard's image. Returns false if it is not kept.
    fn load(&self, owned: OwnedShard, age: ImageAge, image: &mut [u8]) -> Result<bool, Fault>;

    /// Hands bytes of a shard's image of a version to `read`, in order, in one call or several. Returns false
    /// if that image is not kept any more; bytes given to `read` until then do not count. Waits for the
    /// drives.
    fn read(
        &self,
        owned: OwnedShard,
        version: Version,
        bytes: Range<usize>,
        read: &mut dyn FnMut(&[u8]),
    ) -> Result<bool, Fault>;

    /// Announces that bytes of a shard's image will be asked for soon, of a version that the shard has.
    /// Returns at once, and prefetches as far as there is room.
    fn read_ahead(&self, owned: OwnedShard, version: Version, bytes: Range<usize>);

    /// A load has failed, and the images that it stored are invalid.
    fn forget(&self);
}
