//! A restore in three acts that may each be repeated: check, load and hold, start.
//!
//! A client of several servers lets every server hold the checkpoint before the first one starts. A client repeats an
//! act whose answer was lost. The repeat succeeds if the job holds the checkpoint, was started from it, or has its
//! exact state.
//!
//! The source is a sealed checkpoint of any number of servers, size of shards, and tier. A new shard takes its element
//! ranges from the old shards, since the same parameters have the same flat space. All ranges are whole blocks, for
//! which the checkpoint has hashes. Only needed bytes are read, and each is verified.

use std::{ops::Range, path::Path, sync::Arc, time::Instant};

use longshore_proto::{
    Commit, Fault, FaultKind, Formats, JobName, JobSpec, Layout, ShardId, Slice, Step, Version,
    checksum::BlockHash, limits::BLOCK_ELEMENTS,
};

use super::{
    Store,
    fault::{corrupt, defect},
    manifest::{self, Manifest, commit_json},
    part::{Array, Table},
    read::PartReader,
    seal::{check_images, check_shards},
};
use crate::{
    job::{Captured, CheckpointId, Job, LoadedShard, StoredImages},
    record::Record,
    step::Phase,
    tier::{Shape, StateMut},
};

#[derive(Clone, Debug, PartialEq)]
pub struct RestoreInfo {
    pub version: Version,
    pub applied: u64,
    pub commit: Option<Commit>,
    /// The checkpoint's state hash, as its manifest has it.
    pub state_hash: Option<String>,
    /// Images that were read beside the state. With less than `Both`, a delayed job's version before cannot be pulled,
    /// and the first step must be exact.
    pub images: StoredImages,
    /// Digest of the contents, the same for every copy. Clients compare it before any server starts.
    pub id: String,
}

impl Store {
    /// Describes the sealed checkpoint `name` of the job `from`, without reading tensors. Checks that the checkpoint
    /// fits `job`, if one is given.
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
        job.map_or(Ok(()), |job| source.check_visible(job))?;
        Ok((source.info()?, source.manifest.spec))
    }

    /// Runs `check`, and also verifies every byte that this server's shards need.
    pub fn verify(&self, job: &Job, from: &JobName, name: &str) -> Result<RestoreInfo, Fault> {
        let source = Source::open(&self.folder(from, name)?, job.spec())?;
        job.opened().into_iter().try_for_each(|shard| source.verify(job, shard))?;
        source.info()
    }

    /// Fills a job that is still loading with this server's shards of a sealed checkpoint, and holds the job until
    /// [`Job::start_held`]. The checkpoint is `name` of the job `from`, most often the same job. A job that trains
    /// already is compared with the checkpoint, until `deadline`.
    ///
    /// All checks that read no tensors come before anything changes. After an error the job is still loading,
    /// and may be restored from another checkpoint.
    ///
    /// Parameters, groups, rule and the formats of state and master weights must be the checkpoint's. Name, world size,
    /// micro-steps, gradient dtype, shard size and tier may differ. A delayed job reads the checkpoint's images, whose
    /// dtype must then be the job's. A checkpoint of an exact job gives a delayed job only the current image, rounded
    /// from the master weights.
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

    /// Loads a checkpoint into a job of one server, and starts the job at once.
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

/// A checkpoint with all its parts open.
struct Source {
    manifest: Manifest,
    layout: Layout,
    /// The parts in this folder, or the fault of a missing part, which this server may not need.
    readers: Vec<Result<PartReader, Fault>>,
    /// Index of the part that has a shard, by shard of the checkpoint.
    owners: Vec<usize>,
    images: StoredImages,
}

impl Source {
    fn open(folder: &Path, job: &JobSpec) -> Result<Source, Fault> {
        let manifest = Manifest::read(folder)?;
        let unfit = |fault: Fault| {
            corrupt(
                format!("{} ({fault})", folder.join(manifest::FILE).display()),
                "in agreement with itself",
            )
        };
        let layout = manifest.spec.validate().map_err(unfit)?;
        check_shards(&layout, &manifest.parts).map_err(unfit)?;
        check_images(&layout, &manifest.parts).map_err(unfit)?;
        check_commit(&manifest).map_err(unfit)?;
        let images = if job.max_delay == 0 { StoredImages::None } else { manifest.images };
        check_same_model(&manifest.spec, job, images)?;
        let mut readers = Vec::with_capacity(manifest.parts.len());
        let mut owners = vec![0; layout.shards() as usize];
        for (index, part) in manifest.parts.iter().enumerate() {
            let reader = match PartReader::open(folder, part) {
                Err(fault) if fault.kind != FaultKind::NotFound => return Err(fault),
                found => found,
            };
            for entry in &part.shards {
                let frozen = layout.is_frozen(entry.shard);
                let images = if frozen { &[] } else { image_arrays(images) };
                for &array in Array::state(&manifest.spec, frozen).iter().chain(images) {
                    let Ok(reader) = &reader else { break };
                    reader.check(&manifest.spec, entry.shard, array, entry.elements)?;
                }
                owners[entry.shard.index()] = index;
            }
            readers.push(reader);
        }
        Ok(Source { manifest, layout, readers, owners, images })
    }

    fn info(&self) -> Result<RestoreInfo, Fault> {
        let Manifest { version, applied, commit, state_hash, parts, .. } = &self.manifest;
        // A digest of the entries covers the contents, since each entry has the digests of its whole part.
        let parts = serde_json::to_vec(parts).map_err(|error| defect(Path::new(manifest::FILE), error))?;
        Ok(RestoreInfo {
            version: *version,
            applied: *applied,
            commit: commit.clone(),
            state_hash: state_hash.clone(),
            images: self.images,
            id: blake3::hash(&parts).to_hex().to_string(),
        })
    }

    fn reader(&self, shard: ShardId) -> Result<&PartReader, Fault> {
        self.readers[self.owners[shard.index()]].as_ref().map_err(Fault::clone)
    }

    /// Checks that all data for the job's server lie in this folder.
    fn check_visible(&self, job: &Job) -> Result<(), Fault> {
        let opened = job.opened();
        let ranges = opened.iter().map(|&shard| job.layout().shard_range(shard));
        let mut needed = ranges.flat_map(|range| self.layout.slices(range));
        needed.try_for_each(|slice| self.reader(slice.shard).map(drop))
    }

    /// Fills one new shard: bytes are read into its memory, hashed there, and compared with the stored hashes.
    fn fill(&self, job: &Job, shard: ShardId, loaded: LoadedShard<'_>) -> Result<(), Fault> {
        self.fill_blocks(job, shard, job.layout().shard_range(shard), loaded)
    }

    /// Fills some blocks of a shard as `fill` does. `range` gives them in the flat space.
    fn fill_blocks(
        &self,
        job: &Job,
        shard: ShardId,
        range: Range<u64>,
        loaded: LoadedShard<'_>,
    ) -> Result<(), Fault> {
        let LoadedShard { mut state, older_image, image } = loaded;
        let slices = self.layout.slices(range);
        let arrays = match job.layout().is_frozen(shard) {
            true => &[Array::Frozen][..],
            false => &[Array::Master, Array::First, Array::Second],
        };
        for (&array, bytes) in arrays.iter().zip(&mut state.arrays) {
            self.read(array, &slices, bytes)?;
        }
        let captured = Captured { shard, state: state.as_ref(), image: &[], older_image: None };
        let hashes = job.hash_blocks(&captured).into_iter().map(|(_, hash)| hash);
        self.compare(Table::State, &slices, hashes)?;
        if let Some(image) = image {
            self.read(Array::Image, &slices, image)?;
            self.compare(Table::Image, &slices, job.hash_image(image))?;
        }
        if let Some(image) = older_image {
            self.read(Array::OlderImage, &slices, image)?;
            self.compare(Table::OlderImage, &slices, job.hash_image(image))?;
        }
        Ok(())
    }

    fn read(&self, array: Array, slices: &[Slice], mut target: &mut [u8]) -> Result<(), Fault> {
        if target.is_empty() {
            return Ok(()); // a slot the rule does not have
        }
        let bytes = |elements: u64| array.bytes(&self.manifest.spec, elements);
        for slice in slices {
            let (part, rest) = target.split_at_mut(bytes(slice.elements) as usize);
            self.reader(slice.shard)?.read(array, slice.shard, bytes(slice.offset), part)?;
            target = rest;
        }
        Ok(())
    }

    fn compare(
        &self,
        table: Table,
        slices: &[Slice],
        hashes: impl IntoIterator<Item = BlockHash>,
    ) -> Result<(), Fault> {
        let mut hashes = hashes.into_iter();
        for slice in slices {
            let reader = self.reader(slice.shard)?;
            let first = slice.offset / BLOCK_ELEMENTS;
            for (block, found) in
                (first..).zip(hashes.by_ref().take((slice.elements / BLOCK_ELEMENTS) as usize))
            {
                let expected = reader.hash(table, slice.shard, block)?;
                if found != expected {
                    return Err(self.damaged(reader, table, slice.shard, block, found, expected));
                }
            }
        }
        Ok(())
    }

    fn damaged(
        &self,
        reader: &PartReader,
        table: Table,
        shard: ShardId,
        block: u64,
        found: BlockHash,
        expected: BlockHash,
    ) -> Fault {
        let what = match table {
            Table::State => "weights and optimizer state",
            Table::Image => "image",
            Table::OlderImage => "older image",
        };
        let global = self.layout.shard_range(shard).start / BLOCK_ELEMENTS + block;
        let hex = |hash: BlockHash| blake3::Hash::from(hash).to_hex();
        let found = hex(found);
        let value =
            format!("{} ({what} of {shard}, block {global}: BLAKE3 {found})", reader.path().display());
        corrupt(value, format!("of BLAKE3 {}, as it was written", hex(expected)))
    }

    /// Reads one shard and compares it with its hashes. Memory holds a single block at a time, since this memory is
    /// outside the server's budget.
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
        // Commits are compared as JSON, which is exact to the bit. The norm of a skipped step is NaN, which no
        // comparison of floats finds equal.
        let commits = [&progress.last_commit, &info.commit].map(|commit| commit_json(commit).ok());
        if commits[0] != commits[1] {
            return Err(other());
        }
        let (found, hashes) = job.state_hashes(deadline)?;
        if found.version != info.version {
            return Err(other());
        }
        // `hashes` is sorted by owned shard in forward order, then by block.
        let mut hashes = hashes.into_iter().map(|(_, hash)| hash);
        for shard in job.owned_at(Step(info.version.0)) {
            let slices = self.layout.slices(job.layout().shard_range(shard));
            let blocks = job.layout().shard_blocks(shard).len();
            let of_shard: Vec<_> = hashes.by_ref().take(blocks).collect();
            self.compare(Table::State, &slices, of_shard).map_err(|_| other())?;
        }
        Ok(())
    }
}

fn image_arrays(images: StoredImages) -> &'static [Array] {
    match images {
        StoredImages::None => &[],
        StoredImages::Current => &[Array::Image],
        StoredImages::Both => &[Array::Image, Array::OlderImage],
    }
}

fn check_commit(manifest: &Manifest) -> Result<(), Fault> {
    let Some(commit) = &manifest.commit else { return Ok(()) };
    if commit.step.version() != manifest.version {
        return Err(Fault::invalid("commit.step", commit.step, manifest.version, "name the last commit"));
    }
    if let Some(left_out) = commit.left_out.iter().find(|left_out| left_out.steps > manifest.applied) {
        let limit = format!("at most {}, the steps applied", manifest.applied);
        return Err(Fault::invalid(
            "commit.left_out.steps",
            left_out.steps,
            limit,
            "count the steps left out",
        ));
    }
    commit.validate(&manifest.spec)
}

/// Returns the fault of the first field in which the job's model differs from the checkpoint's.
fn check_same_model(checkpoint: &JobSpec, job: &JobSpec, images: StoredImages) -> Result<(), Fault> {
    // Fields that may differ are made equal, so that the comparison of specs in open calls serves here too.
    let alike = JobSpec {
        params: checkpoint.params.clone(),
        groups: checkpoint.groups.clone(),
        rule: checkpoint.rule,
        formats: Formats { seed: job.formats.seed, ..checkpoint.formats },
        // Contributors may change, but not the places of parameters, nor the frozen ones.
        partitions: checkpoint.partitions_as(job),
        image_dtype: match images == StoredImages::None && !checkpoint.has_frozen() {
            true => job.image_dtype,
            false => checkpoint.image_dtype,
        },
        ..job.clone()
    };
    alike.same_as(job).map_err(|fault| Fault {
        limit: fault.limit.replace("as the job was opened", "as in the checkpoint"),
        remedy: match &*fault.field {
            "spec.image_dtype" if checkpoint.has_frozen() => {
                "open the job with the checkpoint's image dtype, in which frozen parameters are kept"
            }
            "spec.image_dtype" => "open the job with the checkpoint's image dtype, or with max_delay 0",
            "spec.partitions" => {
                "open the job with partitions that begin at the same parameters as the checkpoint's, and are frozen where those are"
            }
            "spec.state_format" | "spec.master_format" => "open the job with the checkpoint's formats",
            _ => "restore a checkpoint of this model, or open the job with the checkpoint's parameters and rule",
        }
        .to_string(),
        ..fault
    })
}
