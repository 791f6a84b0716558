//! A snapshot: one consistent version of all shards, copied while training goes on.
//!
//! A snapshot of version V copies every block once, at V. The snapshot's own thread walks the shards in forward order:
//! it copies a few blocks, unlocks the shard, and then hands the copies to the reader. An update that would carry a
//! shard beyond V first copies the rest of the shard. So updates wait for copies at the speed of memory; [`Staging`]
//! bounds their wait for the reader.

use std::{
    sync::{Arc, Mutex, OnceLock, Weak},
    time::Instant,
};

use longshore_proto::{Commit, Fault, FaultKind, ShardId, Version};

use super::{
    super::Job,
    Purpose,
    staging::{Piece, Slot, Staging},
};
use crate::{ids::OwnedShard, lock, step::Refusal, tier::StateRef};

/// Number of slots that the walk fills at once: 64 MiB, the state of a shard of default size. For each fill, a tier on
/// drives reads the whole shard again.
const WALK_SLOTS: usize = 16;

/// A shard as it is at the snapshot's version.
pub struct Captured<'a> {
    pub shard: ShardId,
    pub state: StateRef<'a>,
    /// The current image, and the older one, which is None at version 0. Both are empty in an exact job whose
    /// images live on drives.
    pub image: &'a [u8],
    pub older_image: Option<&'a [u8]>,
}

/// The version that a snapshot copied.
#[derive(Clone, Debug, PartialEq)]
pub struct SnapshotInfo {
    pub version: Version,
    pub applied: u64,
    pub commit: Option<Commit>,
}

/// Fills the copy of one block. Many blocks are copied at the same time, on the update threads.
pub(super) type CopyBlock = dyn Fn(&Captured<'_>, usize, &mut [u8]) + Send + Sync;

/// A requested snapshot, which ends when this value is dropped. The value does not keep the job alive.
pub struct Snapshot {
    copying: Arc<Copying>,
    job: Weak<Job>,
}

/// Watch on a snapshot's end, for a thread that waits for the reader.
pub struct Ended(Arc<Copying>);

/// State that the snapshot's own thread shares with the updates.
pub(super) struct Copying {
    pub(super) version: Version,
    pub(super) purpose: Purpose,
    copy: Box<CopyBlock>,
    /// True if all ranks had left before the request. The version is waited for then, since a later process may make
    /// it.
    asked_after: bool,
    /// Number of copied blocks, by owned shard. The lock is held during copies.
    copied: Vec<Mutex<usize>>,
    pub(super) staging: Staging,
    /// Known once the version is decided.
    pub(super) info: Mutex<Option<SnapshotInfo>>,
    /// By owned shard: true if this server owns it at the version. Known once the version is decided.
    covered: OnceLock<Vec<bool>>,
}

impl Job {
    /// Begins a snapshot of every owned shard at version `asked`; None means the current one. Several servers can name
    /// one future version, which is waited for. `copy` makes `block_bytes` bytes of each block.
    pub(super) fn begin_snapshot(
        self: &Arc<Self>,
        asked: Option<Version>,
        purpose: Purpose,
        block_bytes: usize,
        copy: Box<CopyBlock>,
    ) -> Result<Snapshot, Fault> {
        let largest = self.share.all().map(|owned| self.share.blocks(owned)).max().unwrap_or(0);
        let budget = self.reservation.budget().clone();
        let staging = Staging::new(purpose, block_bytes, largest, budget, Arc::clone(&self.compute));
        let copied = self.share.owned.iter().map(|_| Mutex::new(0)).collect();
        // Under the machine's lock no commit can pass between reading the version and registering the snapshot.
        let machine = self.protocol.machine();
        machine.check_not_loading()?;
        let current = machine.version();
        let version = asked.unwrap_or(current);
        if version < current {
            return Err(Fault::new(
                FaultKind::Precondition,
                "version",
                version.0,
                format!("{}, the current one, or a later one", current.0),
                "ask for the current version; older ones are not kept",
            ));
        }
        let (asked_after, info, covered) = (machine.has_been_left(), Mutex::default(), OnceLock::new());
        let copying =
            Arc::new(Copying { version, purpose, copy, asked_after, copied, staging, info, covered });
        self.snapshots.add(&copying)?;
        self.snapshots.tell(&machine);
        Ok(Snapshot { copying, job: Arc::downgrade(self) })
    }

    /// Hands the images of a version and of the version before to `with`, if `wanted`. An exact job gives none, since
    /// its images follow from its state. A frozen shard's image is its state.
    fn with_images<R>(
        &self,
        wanted: bool,
        owned: OwnedShard,
        version: Version,
        with: impl FnOnce(&[u8], Option<&[u8]>) -> R,
    ) -> Result<R, Fault> {
        if !wanted || self.share.spec.max_delay == 0 || self.share.is_frozen(owned) {
            return Ok(with(&[], None));
        }
        let older = version.0.checked_sub(1).map(Version);
        let current = |older: Option<&[u8]>| {
            self.images.with_whole(owned, version, |image| with(image.unwrap_or_default(), older))
        };
        match older {
            Some(older) => self.images.with_whole(owned, older, current)?,
            None => current(None),
        }
    }
}

impl Snapshot {
    pub fn version(&self) -> Version {
        self.copying.version
    }

    /// Waits for the version, and returns the shards that this server owns then, in forward order.
    pub fn shards(&self, deadline: Instant) -> Result<Vec<ShardId>, Fault> {
        let job = self.job()?;
        job.wait_for_version(&self.copying, deadline)?;
        let shards = job.share.all().filter(|&owned| self.copying.has(owned));
        Ok(shards.map(|owned| job.share.shard(owned)).collect())
    }

    pub fn ended(&self) -> Ended {
        Ended(Arc::clone(&self.copying))
    }

    /// Hands every block to `deliver`, on this thread, and returns when that is done. The deadline bounds the waits for
    /// the version and for updates in progress, but not the time that `deliver` takes. While `deliver` runs, no shard
    /// is locked and the job is not kept alive.
    pub fn run(
        self,
        deadline: Instant,
        mut deliver: impl FnMut(&Piece) -> Result<(), Fault>,
    ) -> Result<SnapshotInfo, Fault> {
        let Snapshot { copying, .. } = &self;
        let mut owned = OwnedShard(0);
        self.job()?.wait_for_version(copying, deadline)?;
        loop {
            while let Some(piece) = copying.staging.next()? {
                deliver(&piece)?;
                copying.staging.taken(piece);
            }
            if owned.index() == copying.copied.len() {
                break;
            }
            let job = self.job()?;
            if copying.has(owned) {
                job.wait_for_shard(copying, owned, deadline)?;
            }
            if !copying.has(owned) || copying.copy_some(&job, owned)? {
                owned = owned.next();
            }
            if owned.index() == copying.copied.len() {
                copying.staging.complete();
            }
        }
        let info = lock(&copying.info).take();
        Ok(info.expect("the run waited for the version, whose decision told the snapshot"))
    }

    fn job(&self) -> Result<Arc<Job>, Fault> {
        self.job.upgrade().ok_or_else(|| {
            let fault =
                Fault::new(FaultKind::NotFound, "job", "gone", "open on this server", "open it again");
            self.copying.staging.end(fault)
        })
    }
}

impl Drop for Snapshot {
    fn drop(&mut self) {
        if let Some(job) = self.job.upgrade() {
            job.snapshots.remove(&self.copying);
        }
        let fault = Fault::new(FaultKind::Unavailable, "snapshot", "over", "running", "ask for another");
        self.copying.staging.end(fault);
    }
}

impl Ended {
    pub fn fault(&self) -> Option<Fault> {
        self.0.staging.ended()
    }
}

impl Job {
    fn wait_for_version(&self, copying: &Copying, deadline: Instant) -> Result<(), Fault> {
        let remedy = "the job has not come so far: ask for its current version";
        self.protocol.wait_until(deadline, "snapshot", remedy, |machine| {
            let reached = machine.version() >= copying.version || copying.staging.ended().is_some();
            let over = reached || !copying.asked_after && machine.has_been_left();
            over.then_some(()).ok_or_else(|| format!("{} of {}", machine.version(), copying.version))
        })?;
        copying.check()?;
        let version = self.protocol.machine().version();
        if version < copying.version {
            let limit = format!("{}, the newest: all ranks have left", version.0);
            let remedy = "ask for the newest version";
            return Err(Fault::new(FaultKind::Precondition, "version", copying.version.0, limit, remedy));
        }
        Ok(())
    }

    fn wait_for_shard(&self, copying: &Copying, owned: OwnedShard, deadline: Instant) -> Result<(), Fault> {
        let version = copying.version;
        self.protocol.wait_until(
            deadline,
            "snapshot",
            "the server is overloaded: try again later",
            |machine| {
                let reached = machine.shard_version(owned) >= version || copying.staging.ended().is_some();
                reached.then_some(()).ok_or_else(|| format!("{} before {version}", self.share.shard(owned)))
            },
        )?;
        copying.check()
    }
}

impl Copying {
    pub(super) fn shards(&self) -> usize {
        self.copied.len()
    }

    /// Notes which shards are this server's at the version.
    pub(super) fn covers(&self, covered: Vec<bool>) {
        let _ = self.covered.set(covered);
    }

    /// Returns true if the snapshot has a shard. Asked once the version is decided.
    pub(super) fn has(&self, owned: OwnedShard) -> bool {
        self.covered.get().is_some_and(|covered| covered[owned.index()])
    }

    fn check(&self) -> Result<(), Fault> {
        self.staging.ended().map_or(Ok(()), Err)
    }

    fn left(&self, job: &Job, owned: OwnedShard) -> usize {
        job.share.blocks(owned) - *lock(&self.copied[owned.index()])
    }

    /// Copies the next few blocks of a shard. Returns true once the whole shard is copied.
    fn copy_some(&self, job: &Job, owned: OwnedShard) -> Result<bool, Fault> {
        let left = self.left(job, owned);
        if left > 0 {
            let slots = self.staging.take(self.staging.slots(left).min(WALK_SLOTS))?;
            if slots.is_empty() {
                // An update holds all slots.
                self.staging.wait();
                return Ok(false);
            }
            self.copy(job, owned, slots);
            self.check()?;
        }
        Ok(self.left(job, owned) == 0)
    }

    /// Copies the remaining blocks of a shard, before an update changes it.
    pub(super) fn copy_rest(&self, job: &Job, owned: OwnedShard) {
        loop {
            let left = self.left(job, owned);
            if left == 0 {
                return;
            }
            let slots = self.staging.take_for_update(self.staging.slots(left));
            if slots.is_empty() {
                return;
            }
            self.copy(job, owned, slots);
            if self.staging.ended().is_some() {
                return;
            }
        }
    }

    /// Fills slots with the shard's next blocks. An error ends the snapshot.
    fn copy(&self, job: &Job, owned: OwnedShard, mut slots: Vec<Slot>) {
        let mut copied = lock(&self.copied[owned.index()]);
        // Checked under the lock, since updates do not wait for a snapshot that has ended.
        if self.staging.ended().is_some() {
            return;
        }
        let (shard, first) = (job.share.shard(owned), *copied);
        let mut places = self.staging.places(&mut slots, job.share.blocks(owned) - first);
        let blocks = places.len();
        let (mut older, mut broken) = (false, None);
        let with_images = self.purpose == Purpose::Checkpoint && blocks > 0;
        let read = job.with_images(with_images, owned, self.version, |image, older_image| {
            older = older_image.is_some();
            job.tier.state.read(owned, &mut |state| {
                let captured = Captured { shard, state, image, older_image };
                let places = std::mem::take(&mut places).into_iter().enumerate().collect();
                let are_whole = job.compute.blocks(places, |(index, place): (usize, &mut [u8])| {
                    (self.copy)(&captured, first + index, place);
                    captured.state.is_whole(first + index)
                });
                broken = are_whole.iter().position(|is_whole| !is_whole);
            })
        });
        drop(places);
        let found = broken.map_or(Ok(()), |block| {
            let (share, block) = (&job.share, job.share.block(owned, first + block));
            let fault = Fault::from(Refusal::broken((&share.spec, &share.layout), shard, block, false));
            Err(Fault {
                remedy: "ask again a few steps later: another server owns the shard by then".into(),
                ..fault
            })
        });
        if let Err(fault) = read.and_then(|read| read).and(found) {
            self.staging.end(fault);
            return;
        }
        *copied += blocks;
        self.staging.put((owned, shard), first, blocks, older, slots);
    }
}
