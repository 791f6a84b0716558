//! Source of a restore: a sealed checkpoint, made by any number of servers, with shards of any size, on any
//! tier.
//!
//! Shards are only a cut of the flat space, which is the same for the same parameters. So a new shard takes
//! its element ranges from the old shards that have them. Both are whole blocks, and hashes are of blocks.
//! Each byte that is read is verified, and no byte is read that is not needed.

use std::{ops::Range, path::Path};

use longshore_proto::{
    Commit, Fault, FaultKind, Formats, JobSpec, Layout, ShardId, Slice, Version, checksum::BlockHash,
    limits::BLOCK_ELEMENTS,
};

use super::{
    fault::{corrupt, defect},
    manifest::{self, Manifest},
    part::{Array, Table},
    read::PartReader,
    seal::{check_images, check_shards},
};
use crate::job::{Captured, Job, LoadedShard, StoredImages};

/// Result of a restore.
#[derive(Clone, Debug, PartialEq)]
pub struct RestoreInfo {
    pub version: Version,
    pub applied: u64,
    pub commit: Option<Commit>,
    /// The checkpoint's state hash, as its manifest has it.
    pub state_hash: Option<String>,
    /// Images that were read beside the state. With less than `Both`, a delayed job's version before cannot
    /// be pulled, and its first step must be an exact one.
    pub images: StoredImages,
    /// A number that is the same for the same contents, wherever they lie. Clients compare it before any server
    /// starts.
    pub id: String,
}

/// A checkpoint with all its parts open.
pub(super) struct Source {
    pub(super) manifest: Manifest,
    pub(super) layout: Layout,
    /// The parts that lie in this folder, or the fault of a missing part. This server may not need a part on
    /// another host.
    readers: Vec<Result<PartReader, Fault>>,
    /// By old shard: the part that has it.
    owners: Vec<usize>,
    pub(super) images: StoredImages,
}

impl Source {
    pub(super) fn open(folder: &Path, job: &JobSpec) -> Result<Source, Fault> {
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

    pub(super) fn info(&self) -> Result<RestoreInfo, Fault> {
        let Manifest { version, applied, commit, state_hash, parts, .. } = &self.manifest;
        // Each part's entry has the digests of all that is in it.
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
    pub(super) fn check_visible(&self, job: &Job) -> Result<(), Fault> {
        let ranges = job.owned().iter().map(|&shard| job.layout().shard_range(shard));
        let mut needed = ranges.flat_map(|range| self.layout.slices(range));
        needed.try_for_each(|slice| self.reader(slice.shard).map(drop))
    }

    /// Fills one new shard. Its bytes are read into its own memory, hashed there, and compared with the
    /// stored hashes.
    pub(super) fn fill(&self, job: &Job, shard: ShardId, loaded: LoadedShard<'_>) -> Result<(), Fault> {
        self.fill_blocks(job, shard, job.layout().shard_range(shard), loaded)
    }

    /// The same for some blocks of a shard, by their range in the flat space.
    pub(super) fn fill_blocks(
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

    pub(super) fn compare(
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

/// The first field in which the job is another model than the checkpoint's.
fn check_same_model(checkpoint: &JobSpec, job: &JobSpec, images: StoredImages) -> Result<(), Fault> {
    // The fields that may differ are made equal, so that the comparison of specs that open uses serves here too.
    let alike = JobSpec {
        params: checkpoint.params.clone(),
        groups: checkpoint.groups.clone(),
        rule: checkpoint.rule,
        formats: Formats { seed: job.formats.seed, ..checkpoint.formats },
        // Other ranks may contribute now, but every parameter must lie where it did, and frozen ones have no state.
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
