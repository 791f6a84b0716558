//! A restore in three acts that may each be repeated: check, load and hold, start.
//!
//! A client of several servers has all of them hold before any of them starts. An act is repeated when its
//! answer was lost or the client has died. The repeat succeeds if the job holds the checkpoint, was started
//! from it, or has come to the very same state in any other way.

use std::{sync::Arc, time::Instant};

use longshore_proto::{Fault, FaultKind, JobName, JobSpec, ShardId, limits::BLOCK_ELEMENTS};

use super::{
    Store,
    manifest::{Manifest, commit_json},
    part::Table,
    restore::{RestoreInfo, Source},
};
use crate::{
    job::{CheckpointId, Job, LoadedShard, StoredImages},
    record::Record,
    step::Phase,
    tier::{Shape, StateMut},
};

impl Store {
    /// Describes the sealed checkpoint `name` of the job `from`. Reads no tensors and changes nothing. Checks that
    /// the checkpoint fits `job`, or without a `job` that it fits itself.
    pub fn check(
        &self,
        job: Option<&Job>,
        from: &JobName,
        name: &str,
    ) -> Result<(RestoreInfo, JobSpec), Fault> {
        let folder = self.folder(from, name)?;
        let source = match job {
            Some(job) => Source::open(&folder, job.spec())?,
            None => Source::open(&folder, &Manifest::read(&folder)?.spec)?,
        };
        if let Some(job) = job {
            source.check_visible(job)?;
        }
        job.map_or(Ok(()), |job| source.check_visible(job))?;
        Ok((source.info()?, source.manifest.spec))
    }

    /// Runs `check`, and also reads and compares every byte that this server's shards need.
    pub fn verify(&self, job: &Job, from: &JobName, name: &str) -> Result<RestoreInfo, Fault> {
        let source = Source::open(&self.folder(from, name)?, job.spec())?;
        job.owned().iter().try_for_each(|&shard| source.verify(job, shard))?;
        source.info()
    }

    /// Fills a job that is still loading with this server's shards of a sealed checkpoint, and holds it back
    /// until [`Job::start_held`]. The checkpoint is `name` of the job `from` (most often its own name).
    /// `deadline` bounds the reading of the state of a job that trains already, which is compared with the
    /// checkpoint's.
    ///
    /// All checks that read no tensors come before anything changes. After an error the job is still loading,
    /// and may be restored from another checkpoint.
    ///
    /// Parameters, groups, rule and the formats of state and master weights must be the checkpoint's. All
    /// else (name, world size, micro-steps, gradient dtype, shard size, tier) may differ. A delayed job reads
    /// the images that the checkpoint has; their dtype must then be the job's too. A checkpoint of an exact
    /// job gives a delayed one the current image only, rounded from the master weights. Such an image is
    /// exact to the bit for an exact step, while the version before is gone.
    pub fn hold(
        &self,
        job: &Arc<Job>,
        from: &JobName,
        name: &str,
        deadline: Instant,
    ) -> Result<RestoreInfo, Fault> {
        let source = Source::open(&self.folder(from, name)?, job.spec())?;
        let info = source.info()?;
        if job.progress().phase != Phase::Loading {
            source.check_same_state(job, &info, deadline)?;
            return Ok(info);
        }
        if !job.holds(&info.id) {
            source.check_visible(job)?;
            let origin = CheckpointId { name: name.to_string(), id: info.id.clone() };
            let RestoreInfo { version, applied, commit, .. } = info.clone();
            let record = Record::new(version, applied, commit);
            job.load(origin, record, source.images, &mut |shard, loaded| source.fill(job, shard, loaded))?;
            tracing::info!(job = %job.spec().name, name, %version, state_hash = ?info.state_hash, "loaded and held");
        }
        Ok(info)
    }

    /// Loads a checkpoint into a job and starts the job at once. For a job without other servers to wait for.
    pub fn restore(
        &self,
        job: &Arc<Job>,
        from: &JobName,
        name: &str,
        deadline: Instant,
    ) -> Result<RestoreInfo, Fault> {
        let info = self.hold(job, from, name, deadline)?;
        job.start_held(&info.id)?;
        Ok(info)
    }
}

impl Source {
    /// Reads one shard and compares it with its hashes. A block at a time is in memory, since no job's admission counts
    /// it.
    fn verify(&self, job: &Job, shard: ShardId) -> Result<(), Fault> {
        let mut starts = job.layout().shard_range(shard).step_by(BLOCK_ELEMENTS as usize);
        starts.try_for_each(|start| self.verify_block(job, shard, start))
    }

    fn verify_block(&self, job: &Job, shard: ShardId, start: u64) -> Result<(), Fault> {
        let elements = BLOCK_ELEMENTS;
        let shape = Shape::of_shard(job.spec(), job.layout(), shard);
        let frozen = job.layout().is_frozen(shard);
        let mut arrays = shape.arrays(elements as usize).map(|bytes| vec![0; bytes]);
        let image = || vec![0; (elements * job.spec().image_dtype.bytes()) as usize];
        let with_older = self.images == StoredImages::Both && self.manifest.version.0 > 0;
        let mut current = (self.images != StoredImages::None && !frozen).then(image);
        let mut older = (with_older && !frozen).then(image);
        let loaded = LoadedShard {
            state: StateMut::new(shape, arrays.each_mut().map(Vec::as_mut_slice)),
            older_image: older.as_deref_mut(),
            image: current.as_deref_mut(),
        };
        self.fill_blocks(job, shard, start..start + elements, loaded)
    }

    /// Refuses a job that has begun, unless its state is this checkpoint's to the last bit.
    fn check_same_state(&self, job: &Arc<Job>, info: &RestoreInfo, deadline: Instant) -> Result<(), Fault> {
        let progress = job.progress();
        let other = || {
            let value = format!("training, at {}", progress.version);
            let limit = format!("loading, or at the state of the checkpoint, {}", info.version);
            let remedy = "weights may be loaded only before the first step; delete the job to start over";
            Fault::new(FaultKind::Precondition, "job.phase", value, limit, remedy)
        };
        if (progress.version, progress.applied) != (info.version, info.applied) {
            return Err(other());
        }
        if job.started_from(&info.id, info.version) {
            return Ok(());
        }
        // Commits are compared as JSON, which is exact to the bit: the norm of a skipped step is NaN, and
        // equals nothing.
        let commits = [&progress.last_commit, &info.commit].map(|commit| commit_json(commit).ok());
        if commits[0] != commits[1] {
            return Err(other());
        }
        let (found, hashes) = job.state_hashes(deadline)?;
        if found.version != info.version {
            return Err(other());
        }
        // `hashes` is by shard in the order of `owned()`, then by block.
        let mut hashes = hashes.into_iter().map(|(_, hash)| hash);
        for &shard in job.owned() {
            let slices = self.layout.slices(job.layout().shard_range(shard));
            let blocks = job.layout().shard_blocks(shard).len();
            let of_shard: Vec<_> = hashes.by_ref().take(blocks).collect();
            self.compare(Table::State, &slices, of_shard).map_err(|_| other())?;
        }
        Ok(())
    }
}
