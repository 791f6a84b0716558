//! A job's first state: progress of its upload, a checkpoint's shards, and the start. Calls of rank 0 or an operator
//! run this on their own threads.
//!
//! A restore has two acts: every server loads and holds the checkpoint, and only then are all started. So if one server
//! cannot load, the job does not train on the others.

use std::sync::MutexGuard;

use longshore_proto::{Dtype, Fault, FaultKind, LeftOut, Rule, ShardId, StateArray, Version};

use super::{Job, compute::BLOCK, images::image_blocks, share::Share};
use crate::{
    ids::OwnedShard,
    kernels::cast,
    lock,
    memory::Region,
    record::Record,
    step::{Phase, Refusal, Restoring},
    tier::{Interrupted, StateMut},
};

/// Progress of the first state.
pub(super) struct Load {
    /// Checksum of each uploaded chunk, by owned shard, then by array and chunk. A frozen shard has chunks of weights
    /// alone.
    pub(super) checksums: Vec<[Vec<Option<u32>>; 3]>,
    /// Kind of the upload, once a chunk of it is stored.
    pub(super) uploaded: Option<Uploaded>,
    pub(super) source: Source,
    /// The checkpoint that is being loaded or is held, or that the job has started from.
    pub(super) origin: Option<CheckpointId>,
    /// Number of shards loaded from `origin` so far.
    pub(super) shards: u32,
    /// True if the current load must end before it reads its next shard.
    pub(super) cancelled: bool,
    /// True once the job is no longer served. No load may begin then.
    pub(super) closed: bool,
}

/// State that rank 0 fills the job with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Uploaded {
    Weights,
    /// Weights and the moments of an optimizer that has updated them `applied` times. Parameters in
    /// `left_out` were updated less often.
    State {
        applied: u64,
        left_out: Vec<LeftOut>,
    },
}

impl Uploaded {
    pub(super) fn of(applied: Option<u64>, left_out: Vec<LeftOut>) -> Uploaded {
        applied.map_or(Uploaded::Weights, |applied| Uploaded::State { applied, left_out })
    }

    /// Returns the record from which the job goes on.
    fn record(self) -> Record {
        match self {
            Uploaded::Weights => Record::filled(0, Vec::new()),
            Uploaded::State { applied, left_out } => Record::filled(applied, left_out),
        }
    }

    fn arrays(&self, rule: Rule) -> &'static [StateArray] {
        match self {
            Uploaded::Weights => &[StateArray::Master],
            Uploaded::State { .. } => StateArray::of(rule),
        }
    }
}

/// Source of the weights, which changes only under the lock of [`Load`]. So an upload never writes into a shard that a
/// restore has filled, nor into a job that has started meanwhile.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Source {
    Upload,
    Restore,
    /// All shards are loaded from a checkpoint, and the job will start with this record.
    Held(Box<Record>),
    Complete,
}

/// The checkpoint that a job is filled from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckpointId {
    pub name: String,
    /// Digest of the contents. Copies in other folders have the same id.
    pub id: String,
}

/// Images of a delayed job's shards that are stored beside their state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StoredImages {
    /// No image: the current image is the rounded master weights.
    None,
    Current,
    /// The current image, and the image of the version before.
    Both,
}

/// State and images of a shard, as a checkpoint gives them.
pub struct LoadedShard<'a> {
    pub state: StateMut<'a>,
    /// The image of the version before, which the loader fills when the checkpoint has it.
    pub older_image: Option<&'a mut [u8]>,
    /// The current image, when it is not simply the rounded master weights.
    pub image: Option<&'a mut [u8]>,
}

impl Load {
    pub(super) fn new(share: &Share) -> Load {
        let chunks = |&shard: &ShardId| {
            StateArray::ALL.map(|array| {
                let here = array == StateArray::Master || !share.layout.is_frozen(shard);
                vec![None; if here { share.layout.chunks(shard, Dtype::F32) as usize } else { 0 }]
            })
        };
        Load {
            checksums: share.owned.iter().map(chunks).collect(),
            uploaded: None,
            source: Source::Upload,
            origin: None,
            shards: 0,
            cancelled: false,
            closed: false,
        }
    }

    /// Begins a restore. Uploaded chunks and a held checkpoint are forgotten, since the restore overwrites
    /// them.
    fn begin_restore(&mut self, origin: CheckpointId) -> Result<(), Fault> {
        self.check_open()?;
        if !matches!(self.source, Source::Upload | Source::Held(_)) {
            let remedy = "wait for the restore in progress; Admin.Describe says when the job is training";
            return Err(Fault::new(
                FaultKind::Precondition,
                "job.phase",
                "being restored",
                "loading",
                remedy,
            ));
        }
        self.source = Source::Restore;
        (self.origin, self.shards, self.cancelled) = (Some(origin), 0, false);
        self.checksums.iter_mut().flatten().for_each(|checksums| checksums.fill(None));
        self.uploaded = None;
        Ok(())
    }

    /// Refuses to load anything into a job that is not served any more.
    fn check_open(&self) -> Result<(), Fault> {
        if !self.closed {
            return Ok(());
        }
        let remedy = "ask again: the job is deleted, or opened anew";
        Err(Fault::new(FaultKind::Unavailable, "job", "being closed", "open", remedy))
    }

    pub(super) fn check_upload(&self, version: Version) -> Result<(), Fault> {
        match self.source {
            Source::Upload => Ok(()),
            Source::Complete => Err(Refusal::NotLoading { version }.into()),
            Source::Restore | Source::Held(_) => {
                let remedy = "finish the restore that was begun (Describe names its checkpoint) and continue from the \
                              job's version, or delete the job to start afresh";
                Err(Fault::new(FaultKind::Precondition, "job.phase", "being restored", "loading", remedy))
            }
        }
    }

    pub(super) fn missing(&self, share: &Share) -> Vec<ShardId> {
        let opened = share.opened();
        match self.source {
            Source::Upload => {
                let arrays = self.uploaded.as_ref().unwrap_or(&Uploaded::Weights).arrays(share.spec.rule);
                let lacks = |owned: &OwnedShard| {
                    let checksums = &self.checksums[owned.index()];
                    arrays.iter().any(|array| checksums[array.index()].iter().any(Option::is_none))
                };
                opened.filter(lacks).map(|owned| share.shard(owned)).collect()
            }
            Source::Restore => opened.skip(self.shards as usize).map(|owned| share.shard(owned)).collect(),
            Source::Held(_) | Source::Complete => Vec::new(),
        }
    }

    /// Returns the checkpoint that is being loaded or is held.
    pub(super) fn restoring(&self, phase: &Phase) -> Option<Restoring> {
        let held = matches!(self.source, Source::Held(_));
        let origin = self.origin.as_ref().filter(|_| *phase == Phase::Loading)?;
        Some(Restoring { checkpoint: origin.name.clone(), shards: self.shards, held })
    }

    pub(super) fn finish(&mut self) {
        self.checksums.iter_mut().flatten().for_each(Vec::clear);
        self.source = Source::Complete;
    }
}

impl Job {
    /// Fills every shard through `read`, and holds the job before its start. A checkpoint that was held before is
    /// released. After an error the job waits for weights as if it had just been opened.
    pub fn load(
        &self,
        origin: CheckpointId,
        record: Record,
        images: StoredImages,
        read: &mut dyn FnMut(ShardId, LoadedShard<'_>) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        self.protocol.machine().check_loading()?;
        lock(&self.load).begin_restore(origin)?;
        // Images of an earlier held checkpoint are stale.
        self.images.forget();
        let version = record.version;
        let loaded = self
            .load_shards(&record, images, read)
            .and_then(|()| self.make_images(version, images))
            .and_then(|()| self.check_cancelled());
        match loaded {
            Ok(()) => lock(&self.load).source = Source::Held(Box::new(record)),
            Err(fault) => {
                self.unload();
                return Err(fault);
            }
        }
        self.protocol.notify();
        Ok(())
    }

    /// Starts the job from the checkpoint that it holds. A repeat after the start is no error.
    pub fn start_held(&self, id: &str) -> Result<(), Fault> {
        let record = {
            let mut load = lock(&self.load);
            let held = load.origin.as_ref().is_some_and(|origin| origin.id == id);
            match (&load.source, held) {
                (Source::Complete, _) => return Ok(()),
                (Source::Held(record), true) => {
                    let record = record.clone();
                    // A starting job is no longer held, and takes no upload.
                    load.source = Source::Restore;
                    record
                }
                _ => return Err(not_held()),
            }
        };
        let started = self.start(&record);
        match &started {
            Ok(()) => lock(&self.load).finish(),
            Err(_) => self.unload(),
        }
        started
    }

    /// Returns true if the job is filled from these contents, and waits for its start.
    pub fn holds(&self, id: &str) -> bool {
        let load = lock(&self.load);
        matches!(load.source, Source::Held(_)) && load.origin.as_ref().is_some_and(|origin| origin.id == id)
    }

    /// Returns true if the job was started from these contents, of version `version`, and has decided no step
    /// since.
    pub fn started_from(&self, id: &str, version: Version) -> bool {
        let load = lock(&self.load);
        let same =
            load.source == Source::Complete && load.origin.as_ref().is_some_and(|origin| origin.id == id);
        drop(load);
        same && self.protocol.machine().version() == version
    }

    /// Releases the held checkpoint. The job then waits for weights as if it had just been opened.
    pub fn release(&self) -> Result<(), Fault> {
        self.protocol.machine().check_loading()?;
        {
            let mut load = lock(&self.load);
            match load.source {
                Source::Upload => return Ok(()),
                Source::Held(_) => load.source = Source::Restore,
                Source::Restore | Source::Complete => return Err(not_held()),
            }
        }
        self.unload();
        Ok(())
    }

    /// Ends a load in progress before it reads its next shard.
    pub fn cancel_load(&self) {
        lock(&self.load).cancelled = true;
    }

    /// Ends a load in progress, and lets none begin.
    pub fn close_load(&self) {
        lock(&self.load).closed = true;
    }

    fn check_cancelled(&self) -> Result<(), Fault> {
        let load = lock(&self.load);
        load.check_open()?;
        if !load.cancelled {
            return Ok(());
        }
        let remedy = "restore the checkpoint again where it is still wanted";
        Err(Fault::new(FaultKind::Precondition, "restore", "given up by an operator", "wanted", remedy))
    }

    fn unload(&self) {
        self.forget();
        let mut load = lock(&self.load);
        let closed = load.closed;
        *load = Load { closed, ..Load::new(&self.share) };
        drop(load);
        self.protocol.notify();
    }

    fn load_shards(
        &self,
        record: &Record,
        images: StoredImages,
        read: &mut dyn FnMut(ShardId, LoadedShard<'_>) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        let version = record.version;
        let with_older = images == StoredImages::Both && version.0 > 0;
        for owned in self.share.opened() {
            let shard = self.share.shard(owned);
            self.check_cancelled()?;
            if self.share.is_frozen(owned) {
                let mut result = Ok(());
                self.tier.state.load(owned, &mut |state| {
                    result = read(shard, LoadedShard { state, older_image: None, image: None });
                })?;
                result?;
                self.note_loaded();
                continue;
            }
            let mut current = self.images.to_make(owned, version);
            // The images of versions v - 1 and v + 1 share one place. The place is requested by v + 1, since version 0
            // has no version before.
            let mut older = self.images.to_make(owned, Version(version.0 + 1));
            let length = self.images.len(owned);
            let mut result = Ok(());
            self.tier.state.load(owned, &mut |state| {
                let image =
                    (images != StoredImages::None).then(|| &mut current.overwrite().bytes_mut()[..length]);
                let older_image = with_older.then(|| &mut older.overwrite().bytes_mut()[..length]);
                result = read(shard, LoadedShard { state, older_image, image });
            })?;
            result?;
            current.set((images != StoredImages::None).then_some(version));
            older.set(with_older.then(|| Version(version.0 - 1)));
            drop((current, older));
            if self.images.are_spilled() {
                // The image window does not keep loaded images until the start, so the tier stores them now.
                self.images.store(owned, version)?;
            }
            self.note_loaded();
        }
        Ok(())
    }

    fn note_loaded(&self) {
        lock(&self.load).shards += 1;
        self.protocol.notify();
    }

    /// Undoes a load. Images and moments must not stay: the next load may bring fewer images, and an upload may bring
    /// only master weights.
    fn forget(&self) {
        self.images.forget();
        for owned in self.share.opened() {
            let cleared = self.tier.state.load(owned, &mut |state| {
                state.arrays.into_iter().for_each(|array| array.fill(0));
            });
            if let Err(fault) = cleared {
                // The failure is only logged, since the next load of this shard then fails too.
                tracing::error!(job = %self.share.spec.name, %fault, "could not clear a shard after a failed load");
            }
        }
    }

    /// Makes the current image of every shard for which none was loaded.
    fn make_images(&self, version: Version, loaded: StoredImages) -> Result<(), Fault> {
        let stored = self.images.are_spilled() && loaded != StoredImages::None;
        for owned in self.share.trained().filter(|_| !stored) {
            self.make_image(owned, version)?;
            self.images.store(owned, version)?;
        }
        Ok(())
    }

    /// Starts the job if rank 0's upload is complete.
    pub(super) fn start_if_whole(&self, mut load: MutexGuard<'_, Load>) -> Result<(), Fault> {
        if load.source != Source::Upload || !load.missing(&self.share).is_empty() {
            return Ok(());
        }
        let record = load.uploaded.clone().unwrap_or(Uploaded::Weights).record();
        load.finish();
        drop(load);
        let started = self.make_images(Version(0), StoredImages::None).and_then(|()| self.start(&record));
        // After a failure the job waits for weights again.
        started.inspect_err(|_| self.unload())
    }

    /// Keeps the loaded state in the tier, and opens the job for steps.
    fn start(&self, record: &Record) -> Result<(), Fault> {
        let older = Version(record.version.0.saturating_sub(1));
        let loaded = self.share.trained().all(|owned| self.images.here(owned, older).is_some());
        let oldest = if loaded { older } else { record.version };
        let seal = |owned| self.tier.state.seal(owned, record.version, oldest);
        self.compute.blocks(self.share.opened().collect(), seal).into_iter().collect::<Result<(), _>>()?;
        self.tier.durable.as_ref().map_or(Ok(()), |durable| durable.start(record))?;
        let started = self.protocol.machine().loaded(record.clone());
        self.protocol.notify();
        started.map_err(|refusal| {
            let fault = Fault::from(refusal);
            Fault { kind: FaultKind::Conflict, ..fault }
        })
    }

    /// Makes the current image from the master weights, unless it was loaded.
    pub(super) fn make_image(&self, owned: OwnedShard, version: Version) -> Result<(), Fault> {
        if self.images.here(owned, version).is_some() {
            return Ok(());
        }
        let mut image = self.images.to_make(owned, version);
        self.round_master(owned, image.overwrite())?;
        image.set(Some(version));
        Ok(())
    }

    /// Writes a shard's master weights, rounded to the image dtype. `image` may be longer than the shard.
    pub(super) fn round_master(&self, owned: OwnedShard, image: &mut Region) -> Result<(), Fault> {
        self.tier.state.read(owned, &mut |state| {
            let images = image_blocks(image, self.share.spec.image_dtype, BLOCK);
            let isa = self.compute.isa();
            let images = images.into_iter().take(state.blocks()).enumerate().collect();
            self.compute.blocks(images, |(block, image)| {
                state.with_master(isa, block, |master| cast(isa, master, image));
            });
        })
    }

    /// Goes on from a version that the tier has kept. Every block is read and compared.
    pub(super) fn recover(&self, record: Record) -> Result<(), Fault> {
        let (share, version) = (&self.share, record.version);
        let kept =
            |owned: OwnedShard| record.versions_of(share.shard(owned), share.server, share.is_opened(owned));
        let here: Vec<_> = share.all().filter_map(|owned| Some((owned, kept(owned)?))).collect();
        self.make_room(
            &here.iter().map(|(owned, _)| share.shard(*owned)).collect::<Vec<_>>(),
            |_, _| Ok(()),
        )?;
        for (owned, kept) in here {
            let trained = !self.share.is_frozen(owned);
            if trained {
                self.images.recover(owned, version, &kept)?;
            }
            // The state is read even if the image was kept: a damaged block must be found while the version before can
            // still be taken.
            self.tier.state.read(owned, &mut |_| ())?;
            if trained && *kept.end() == version {
                self.make_image(owned, version)?;
            }
        }
        if let Some(behind) = &self.tier.behind {
            behind.adopt()?;
        }
        lock(&self.load).finish();
        self.protocol.machine().recovered(record)?;
        tracing::info!(job = %self.share.spec.name, %version, "recovered");
        Ok(())
    }

    /// Goes on after a process that was killed at any instant. Updates of decided steps are finished from the kept
    /// contributions.
    pub(super) fn resume_updates(&self, kept: Interrupted) -> Result<(), Fault> {
        let here: Vec<_> =
            self.share.all().zip(&kept.shards).filter_map(|(owned, of)| Some((owned, (*of)?))).collect();
        for (owned, shard) in here.iter().filter(|(owned, of)| !of.awaited && !self.share.is_frozen(*owned)) {
            self.images.found(*owned, shard, self.tier.kept.as_ref())?;
        }
        // The earlier process may have died before it freed the space of shards that are now elsewhere.
        let is_away = |owned: &OwnedShard| kept.shards[owned.index()].is_none();
        self.share.all().filter(is_away).for_each(|owned| self.release_space(owned));
        lock(&self.load).finish();
        let mut machine = self.protocol.machine();
        let work = machine.resume_updates(kept.records, &kept.shards)?;
        let version = machine.version();
        let settled = self.tier.kept.iter().flat_map(|kept| kept.settled());
        for (step, computed_with) in settled.filter(|(step, _)| step.version() > version) {
            machine.was_computed_with(step, computed_with);
        }
        for &(owned, shard) in &here {
            for step in shard.summed {
                if step.version() <= version || !machine.is_complete(owned, step) {
                    continue;
                }
                let nonfinite = self.gradients.form_statistics_again(owned, step);
                machine.summed_before(owned, step, nonfinite);
            }
        }
        drop(machine);
        self.make_room(
            &here.iter().map(|(owned, _)| self.share.shard(*owned)).collect::<Vec<_>>(),
            |_, _| Ok(()),
        )?;
        tracing::info!(job = %self.share.spec.name, %version, unfinished = work.len(), "recovered");
        self.protocol.leave_unfinished(work);
        Ok(())
    }
}

fn not_held() -> Fault {
    let remedy = "restore the checkpoint again: another restore or a release came between";
    Fault::new(FaultKind::Precondition, "restore", "not held", "loaded and held", remedy)
}
