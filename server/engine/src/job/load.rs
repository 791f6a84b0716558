//! A job's first weights, uploaded by rank 0 or read from a checkpoint.

use longshore_proto::{ChunkId, Dtype, Fault, FaultKind, Incarnation, Layout, ShardId, Version};

use super::{Job, compute::BLOCK, images::image_blocks, padding::check_padding};
use crate::{
    ids::{OwnedShard, OwnedShards},
    kernels::{ImageMut, MasterMut, cast},
    lock,
    record::Record,
    step::Refusal,
    tier::{Interrupted, StateMut},
};

/// How far the first weights have come.
pub(super) struct Load {
    /// By owned shard, then by chunk: the checksum of an uploaded chunk.
    pub(super) checksums: Vec<Vec<Option<u32>>>,
    pub(super) source: Source,
    /// The checkpoint that is being loaded or is held, or that the job has started from.
    pub(super) origin: Option<CheckpointId>,
    /// How many shards were loaded from it so far.
    pub(super) shards: u32,
    /// The load under way must end before it reads its next shard.
    pub(super) cancelled: bool,
}

/// Where the weights come from. It changes only under the lock of [`Load`]. So an upload never writes into a shard that
/// a restore has filled, nor into a job that has started since the upload was admitted.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Source {
    Upload,
    Restore,
    /// All is loaded from a checkpoint, and the job will start with this.
    Held(Box<Record>),
    Complete,
}

/// The checkpoint that a job is filled from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckpointId {
    pub name: String,
    /// It is the same for the same contents, wherever they lie and whichever server reads them.
    pub id: String,
}

/// Which images of a delayed job's shards are stored beside their state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StoredImages {
    /// There is none: the current image is the rounded master weights.
    None,
    Current,
    /// The current image, and that of the version before.
    Both,
}

/// One shard's state and images as a checkpoint gives them.
pub struct LoadedShard<'a> {
    pub state: StateMut<'a>,
    /// The image of the version before, which the loader fills when the checkpoint has it.
    pub older_image: Option<&'a mut [u8]>,
    /// The current image, when it is not simply the rounded master weights.
    pub image: Option<&'a mut [u8]>,
}

impl Load {
    pub(super) fn new(layout: &Layout, owned: &[ShardId]) -> Load {
        let chunks = |&shard: &ShardId| vec![None; layout.chunks(shard, Dtype::F32) as usize];
        Load {
            checksums: owned.iter().map(chunks).collect(),
            source: Source::Upload,
            origin: None,
            shards: 0,
            cancelled: false,
        }
    }

    /// Begins a restore. It will overwrite what was loaded, so chunks that were uploaded, and a checkpoint that was
    /// held, are forgotten.
    pub(super) fn begin_restore(&mut self, origin: CheckpointId) -> Result<(), Fault> {
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
        self.checksums.iter_mut().for_each(|checksums| checksums.fill(None));
        Ok(())
    }

    fn check_upload(&self, version: Version) -> Result<(), Fault> {
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

    pub(super) fn missing(&self, owned: &[ShardId]) -> Vec<ShardId> {
        match self.source {
            Source::Upload => {
                let shards = owned.iter().zip(&self.checksums);
                let missing = shards.filter(|(_, checksums)| checksums.iter().any(Option::is_none));
                missing.map(|(&shard, _)| shard).collect()
            }
            Source::Restore => owned.iter().copied().skip(self.shards as usize).collect(),
            Source::Held(_) | Source::Complete => Vec::new(),
        }
    }

    pub(super) fn finish(&mut self) {
        self.checksums.iter_mut().for_each(Vec::clear);
        self.source = Source::Complete;
    }
}

impl Job {
    /// Stores a chunk of fp32 initial weights. With the last one the job starts at version 0.
    pub fn upload(
        &self,
        incarnation: Incarnation,
        shard: ShardId,
        chunk: ChunkId,
        crc32: u32,
        payload: &[u8],
    ) -> Result<(), Fault> {
        let owned = {
            let machine = self.protocol.machine();
            machine.check_loading()?;
            machine.check_rank_zero(incarnation)?;
            machine.owned_index(shard)?
        };
        let chunks = self.layout.chunks(shard, Dtype::F32);
        let Some(range) = self.layout.chunk_bytes(shard, chunk, Dtype::F32) else {
            return Err(Refusal::UnknownChunk { shard, chunk, chunks }.into());
        };
        if payload.len() as u64 != range.end - range.start {
            let limit = format!("{} bytes", range.end - range.start);
            let remedy = "chunks are 1 MiB, the last one of a shard what is left";
            return Err(Fault::invalid("payload", format!("{} bytes", payload.len()), limit, remedy));
        }
        let mut load = lock(&self.load);
        load.check_upload(Version(0))?;
        match load.checksums[owned.index()].get(chunk.0 as usize).copied().flatten() {
            Some(earlier) if earlier == crc32 => return Ok(()),
            Some(earlier) => return Err(Refusal::OtherUpload { shard, chunk, crc32, earlier }.into()),
            None => {}
        }
        self.check_weights(shard, range.start, payload)?;
        self.tier.state.load(owned, &mut |mut state| {
            self.store_weights(&mut state, range.start as usize / size_of::<f32>(), payload);
        })?;
        load.checksums[owned.index()][chunk.0 as usize] = Some(crc32);
        if load.missing(&self.owned).is_empty() {
            load.finish();
            drop(load);
            self.make_images(Version(0), StoredImages::None)?;
            return self.start(&Record::new(Version(0), 0, None));
        }
        Ok(())
    }

    /// Checks that uploaded weights, from byte `at` of their shard, are numbers, and that padding is 0.
    fn check_weights(&self, shard: ShardId, at: u64, payload: &[u8]) -> Result<(), Fault> {
        let first = self.layout.shard_range(shard).start + at / size_of::<f32>() as u64;
        check_padding(&self.layout, first, payload, Dtype::F32)?;
        let weights = payload.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes));
        match weights.enumerate().find(|(_, weight)| !weight.is_finite()) {
            Some((index, weight)) => {
                let value = format!("{weight} at element {} of the flat space", first + index as u64);
                let remedy =
                    "initial weights that are not numbers spoil the model: look at how they were made";
                Err(Fault::invalid("payload", value, "finite", remedy))
            }
            None => Ok(()),
        }
    }

    /// Puts fp32 weights at element `at` of a shard. They are rounded to nearest if the master weights have fewer bits.
    fn store_weights(&self, state: &mut StateMut<'_>, at: usize, payload: &[u8]) {
        let elements = at..at + payload.len() / size_of::<f32>();
        match state.master() {
            MasterMut::F32(master) => {
                bytemuck::cast_slice_mut::<f32, u8>(&mut master[elements]).copy_from_slice(payload);
            }
            MasterMut::Bf16(master) => {
                // A payload may lie at any alignment in its message.
                let weights = payload.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes));
                let weights: Vec<f32> = weights.collect();
                cast(self.compute.isa(), &weights, ImageMut::Bf16(&mut master[elements]));
            }
        }
    }

    pub(super) fn load_shards(
        &self,
        record: &Record,
        images: StoredImages,
        read: &mut dyn FnMut(ShardId, LoadedShard<'_>) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        let version = record.version;
        let with_older = images == StoredImages::Both && version.0 > 0;
        for (owned, &shard) in OwnedShards::all(self.owned.len()).zip(&self.owned) {
            self.check_cancelled()?;
            let mut current = self.images.to_make(owned, version);
            // The image of the version before and that of the next version have the same place. The next version is
            // asked for, since before version 0 there is none.
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
            let amended = with_older && self.is_amended(record);
            if amended {
                let image = &older.bytes()[..length];
                self.tier.state.load(owned, &mut |state| state.into_amended().copy_from_slice(image))?;
            }
            older.set((with_older && !amended).then(|| Version(version.0 - 1)));
            drop((current, older));
            if self.images.are_spilled() {
                // The image window does not keep them until the start.
                self.images.store(owned, version)?;
            }
            lock(&self.load).shards += 1;
            self.notify();
        }
        Ok(())
    }

    /// Undoes a load. What is loaded next may bring fewer images, and an upload brings only master weights. So images
    /// and moments of this load must not stay.
    pub(super) fn forget(&self) {
        self.images.forget();
        for owned in OwnedShards::all(self.owned.len()) {
            let cleared = self.tier.state.load(owned, &mut |state| {
                state.arrays.into_iter().for_each(|array| array.fill(0));
            });
            if let Err(fault) = cleared {
                // The next load of this shard then fails too.
                tracing::error!(job = %self.spec.name, %fault, "could not clear a shard after a failed load");
            }
        }
    }

    /// Makes the current image of every shard for which none was loaded.
    pub(super) fn make_images(&self, version: Version, loaded: StoredImages) -> Result<(), Fault> {
        let stored = self.images.are_spilled() && loaded != StoredImages::None;
        for owned in OwnedShards::all(self.owned.len()).filter(|_| !stored) {
            self.make_image(owned, version)?;
            self.images.store(owned, version)?;
        }
        Ok(())
    }

    /// Has the tier keep what is loaded, and opens the job for steps.
    pub(super) fn start(&self, record: &Record) -> Result<(), Fault> {
        if let Some(kept) = &self.tier.kept {
            let older = record.version.0.checked_sub(1).map(Version);
            let loaded = |older| {
                OwnedShards::all(self.owned.len()).all(|owned| self.images.here(owned, older).is_some())
            };
            kept.older_images(older.is_some_and(loaded));
        }
        self.make_rates(record.version, record.applied, record.commit.as_ref(), self.all())?;
        if let Some(durable) = &self.tier.durable {
            durable.start(record)?;
        }
        let Record { version, applied, commit, .. } = record.clone();
        let started = self.protocol.machine().loaded(version, applied, commit);
        self.notify();
        started.map_err(|refusal| {
            let fault = Fault::from(refusal);
            Fault { kind: FaultKind::Conflict, ..fault }
        })
    }

    /// Makes the current image from the master weights, unless it was loaded.
    fn make_image(&self, owned: OwnedShard, version: Version) -> Result<(), Fault> {
        if self.images.here(owned, version).is_some() {
            return Ok(());
        }
        let mut image = self.images.to_make(owned, version);
        let region = image.overwrite();
        self.tier.state.read(owned, &mut |state| {
            let images = image_blocks(region, self.spec.image_dtype, BLOCK);
            let isa = self.compute.isa();
            // An image's memory may be longer than the shard.
            let images = images.into_iter().take(state.blocks()).enumerate().collect();
            self.compute.blocks(images, |(block, image)| {
                state.with_master(isa, block, |master| cast(isa, master, image));
            });
        })?;
        image.set(Some(version));
        Ok(())
    }

    /// Goes on from a version that the tier has kept. Every block of it is read and compared on the way.
    pub(super) fn recover(&self, record: Record) -> Result<(), Fault> {
        let version = record.version;
        for owned in OwnedShards::all(self.owned.len()) {
            self.images.recover(owned, version)?;
            // The state is read even if the image was kept: a damaged block must be found while the server can still
            // take the version before.
            self.tier.state.read(owned, &mut |_| ())?;
            self.make_image(owned, version)?;
        }
        if let Some(behind) = &self.tier.behind {
            behind.adopt()?;
        }
        self.make_rates(version, record.applied, record.commit.as_ref(), self.all())?;
        lock(&self.load).finish();
        self.protocol.machine().recovered(record)?;
        tracing::info!(job = %self.spec.name, %version, "recovered");
        Ok(())
    }

    /// Goes on after a process that was killed at any instant. The steps that it had decided are updated to the end,
    /// from the contributions that it had.
    pub(super) fn resume_updates(&self, kept: Interrupted) -> Result<(), Fault> {
        for (owned, shard) in OwnedShards::all(kept.shards.len()).zip(&kept.shards) {
            self.images.found(owned, shard);
        }
        if let Some(Record { version, applied, commit, .. }) = kept.records.last() {
            // The rates of a shard with an unfinished update are made by that update.
            let there = self.all().zip(&kept.shards).filter(|(_, shard)| shard.version == *version);
            self.make_rates(*version, *applied, commit.as_ref(), there.map(|(owned, _)| owned))?;
        }
        lock(&self.load).finish();
        let mut machine = self.protocol.machine();
        let shards = kept.shards.iter().map(|shard| (shard.version, shard.summed)).collect::<Vec<_>>();
        let work = machine.resume_updates(kept.records, &shards)?;
        let version = machine.version();
        for (owned, shard) in OwnedShards::all(kept.shards.len()).zip(&kept.shards) {
            for step in shard.summed {
                if step.version() <= version || !machine.is_complete(owned, step) {
                    continue;
                }
                let nonfinite = self.gradients.form_statistics_again(owned, step);
                machine.summed_before(owned, step, nonfinite);
            }
        }
        drop(machine);
        tracing::info!(job = %self.spec.name, %version, unfinished = work.len(), "recovered");
        self.protocol.leave_unfinished(work);
        Ok(())
    }
}
