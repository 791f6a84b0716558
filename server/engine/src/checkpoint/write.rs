//! The writing of one server's part, shard by shard as the snapshot visits them.

use std::{
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Instant,
};

use longshore_proto::{
    Fault, FaultKind, JobSpec, ShardId, Step, TierKind, Version, checksum::BlockHash, limits::BLOCK_ELEMENTS,
};

use super::{
    Store,
    fault::{FIELD, defect, io, other_servers},
    files::{self, Draft, remove_drafts},
    manifest::{self, Manifest},
    part::{Array, Part, PartShard, Table},
    plan::{Found, MAX_HEADER_BYTES, PartPlan},
    read::PartReader,
    removal::remove_part,
    seal::{entry_path, lock},
    writers::Turn,
};
use crate::{
    job::{BlockCopy, CopiedBlock, Job, PartUnderWay, Piece, Snapshot, SnapshotInfo, StoredImages},
    step::Phase,
};

struct Sink {
    job: Arc<Job>,
    under_way: PartUnderWay,
    draft: Draft,
    sequence: u64,
    data_start: u64,
    /// The part's shards, in forward order.
    shards: Vec<ShardId>,
    /// The data offsets of all arrays that a shard may have, for each of the part's shards.
    places: Vec<Vec<(Array, u64)>>,
}

#[derive(Clone, Default)]
struct Hashes {
    state: Vec<BlockHash>,
    image: Vec<BlockHash>,
    older_image: Vec<BlockHash>,
}

impl Store {
    /// Writes this server's part of checkpoint `name` of the current version, or of version `expected`, while training
    /// goes on. Blocks until the part is on disk; [`Store::seal`] then makes the checkpoint. If the name is sealed
    /// already with the same state, returns that checkpoint's part. After an error no part is left behind. The deadline
    /// bounds the wait for updates in progress, not the disk.
    ///
    /// Several authors may ask for one part, which stays until the last of them [gives it up](Store::discard). A part
    /// that all of them gave up meanwhile is no success.
    pub fn write(
        &self,
        author: u64,
        job: &Arc<Job>,
        name: &str,
        expected: Option<Version>,
        deadline: Instant,
    ) -> Result<Part, Fault> {
        let folder = self.folder(&job.spec().name, name)?;
        if job.progress().phase == Phase::Loading {
            let remedy = "upload the weights or restore a checkpoint first";
            return Err(Fault::new(FaultKind::Precondition, "job.phase", "loading", "training", remedy));
        }
        let (number, count) = job.part();
        let target = folder.join(Part::file_name(number, count));
        let mut turn = self.writers.enter(&target, author, deadline)?;
        let written = self.write_in_turn(&turn, job, &target, (name, count), expected, deadline);
        if turn.end() {
            return written;
        }
        let _lock = lock(&folder)?;
        if !remove_part(&folder, &target)? {
            return written;
        }
        written.and_then(|_| Err(given_up(name)))
    }

    /// Writes the part `target` of one of `servers` servers.
    fn write_in_turn(
        &self,
        turn: &Turn<'_>,
        job: &Arc<Job>,
        target: &Path,
        (name, servers): (&str, u32),
        expected: Option<Version>,
        deadline: Instant,
    ) -> Result<Part, Fault> {
        let folder = files::parent(target);
        if folder.join(manifest::FILE).exists() {
            return sealed_part(job, folder, name, expected, deadline);
        }
        // The part is not written twice: a second one of the same state would differ in its header's order.
        if let Some(part) = turn.found(job, name, expected)? {
            return Ok(part);
        }
        let sequence = self.make_way(&job.spec().name)?;
        remove_drafts(target);
        let spec = serde_json::to_vec(job.spec()).map_err(|error| defect(target, error))?;
        let (snapshot, layout) = job.begin_checkpoint(expected)?;
        let shards = snapshot.shards(deadline)?;
        let (number, count) = job.part();
        if target != folder.join(Part::file_name(number, count)) {
            return Err(other_servers(servers, count));
        }
        let plan = plan(job, &shards, &spec);
        let sink = Sink::prepare(job, &plan, target.to_path_buf(), sequence)?;
        let written = sink.record(&plan, &spec, (snapshot, layout), deadline);
        if written.is_err() {
            sink.draft.discard();
        }
        let part = written?;
        turn.written(&part, job);
        tracing::info!(job = %part.job, name, version = %part.version, bytes = part.bytes, "part written");
        Ok(part)
    }
}

/// Returns this server's part of a checkpoint that is sealed under this name. Refuses a part of another state: a job
/// that went back comes to the same step again.
fn sealed_part(
    job: &Arc<Job>,
    folder: &Path,
    name: &str,
    expected: Option<Version>,
    deadline: Instant,
) -> Result<Part, Fault> {
    // A damaged checkpoint may not be overwritten either.
    let found = Manifest::read(folder).ok().and_then(|manifest| own_part(job, manifest));
    let part = found.filter(|part| expected.is_none_or(|version| version == part.version));
    let Some(part) = part else { return Err(taken(name)) };
    let Ok(reader) = PartReader::open(folder, &part) else { return Err(taken(name)) };
    let (info, hashes) = job.state_hashes(deadline)?;
    let blocks = part
        .shards
        .iter()
        .flat_map(|entry| (0..entry.elements / BLOCK_ELEMENTS).map(move |block| (entry.shard, block)));
    // Both lists are in the order of the flat space.
    let same = (info.version, info.applied) == (part.version, part.applied)
        && blocks.zip(&hashes).all(|((shard, block), (_, hash))| {
            reader.hash(Table::State, shard, block).is_ok_and(|sealed| sealed == *hash)
        });
    if !same {
        return Err(taken(name));
    }
    tracing::info!(job = %part.job, name, version = %part.version, "this state is sealed under this name already");
    Ok(part)
}

/// Returns this server's part, if the job has not changed since the seal.
fn own_part(job: &Job, manifest: Manifest) -> Option<Part> {
    let mine = |part: &Part| {
        (part.server, part.servers) == job.part()
            && part.shards.iter().map(|entry| entry.shard).eq(job.owned_at(Step(part.version.0)))
    };
    // A job with another spec would write another part. Only the tier may have changed.
    let spec = JobSpec { tier: job.spec().tier, ..manifest.spec.clone() };
    if spec != *job.spec() {
        return None;
    }
    manifest.parts.into_iter().find(mine)
}

fn given_up(name: &str) -> Fault {
    let value = format!("{name}, given up by all callers during the write");
    let remedy = "checkpoint again; where no caller waits that long, use a faster folder or more servers";
    Fault::new(FaultKind::Precondition, FIELD, value, "wanted until it is written", remedy)
}

fn taken(name: &str) -> Fault {
    let remedy = "choose another name; sealed checkpoints are never overwritten";
    Fault::new(FaultKind::Conflict, "name", name, "not a sealed checkpoint's of another state", remedy)
}

pub(super) fn plan<'a>(job: &'a Job, shards: &'a [ShardId], spec: &[u8]) -> PartPlan<'a> {
    let ((server, servers), spec_bytes) = (job.part(), spec.len() as u64);
    PartPlan { spec: job.spec(), layout: job.layout(), shards, server, servers, spec_bytes }
}

/// Largest room that a part can take.
pub(super) struct Room {
    data_start: u64,
    pub(super) bytes: u64,
}

pub(super) fn room(plan: &PartPlan<'_>, target: &Path) -> Result<Room, Fault> {
    let header = plan.header(plan.largest()).map_err(|error| defect(target, error))?;
    let data_start = header.data_start();
    if data_start > MAX_HEADER_BYTES {
        let value = format!("{data_start} bytes of header in {}", target.display());
        let limit = format!("at most {MAX_HEADER_BYTES}, as safetensors readers accept");
        let remedy = "open the job with larger shards or more servers";
        return Err(Fault::new(FaultKind::Exhausted, FIELD, value, limit, remedy));
    }
    Ok(Room { data_start, bytes: data_start + header.data })
}

impl Sink {
    fn prepare(job: &Arc<Job>, plan: &PartPlan<'_>, target: PathBuf, sequence: u64) -> Result<Sink, Fault> {
        let largest = plan.largest();
        let Room { data_start, bytes } = room(plan, &target)?;
        let (mut places, shards) = (vec![Vec::new(); plan.shards.len()], plan.shards.to_vec());
        let index = |shard| shards.binary_search(&shard).unwrap_or_default();
        for (shard, array, offset) in plan.arrays(largest.images) {
            places[index(shard)].push((array, offset));
        }
        let draft = Draft::create(target, sequence)?;
        draft.reserve(bytes)?;
        let under_way = job.snapshots.begin_part(bytes);
        Ok(Sink { job: Arc::clone(job), under_way, draft, sequence, data_start, shards, places })
    }

    fn index(&self, piece: &Piece) -> usize {
        self.shards.binary_search(&piece.shard).unwrap_or_default()
    }

    fn record(
        &self,
        plan: &PartPlan<'_>,
        spec: &[u8],
        (snapshot, layout): (Snapshot, BlockCopy),
        deadline: Instant,
    ) -> Result<Part, Fault> {
        let mut hashes = vec![Hashes::default(); self.places.len()];
        let info =
            snapshot.run(deadline, |piece| self.take(piece, layout, &mut hashes[self.index(piece)]))?;
        let part = self.finish(plan, spec, info, &hashes)?;
        // The entry lies beside the part, so that draining servers need no client to exchange entries. The entry is
        // written first, since its sequence tells other servers when the part is superseded.
        files::publish(entry_path(self.draft.path()), self.sequence, part.to_json()?.as_bytes())?;
        self.draft.publish()?;
        Ok(part)
    }

    fn take(&self, piece: &Piece, layout: BlockCopy, hashes: &mut Hashes) -> Result<(), Fault> {
        let frozen = self.job.layout().is_frozen(piece.shard);
        for (index, block) in piece.blocks().enumerate() {
            let CopiedBlock { state, image, older_image, .. } = layout.cut(block, frozen);
            for &(array, offset) in &self.places[self.index(piece)] {
                let bytes = match array {
                    Array::Master | Array::Frozen => state[0],
                    Array::First => state[1],
                    Array::Second => state[2],
                    Array::Image => image,
                    Array::OlderImage if !piece.older_image => continue,
                    Array::OlderImage => older_image,
                };
                self.put(offset + ((piece.first + index) * bytes.len()) as u64, bytes)?;
            }
        }
        let images = self.job.spec().max_delay >= 1;
        let found = self.job.compute().blocks(piece.blocks().collect(), |block: &[u8]| {
            let block = layout.cut(block, frozen);
            let hash = |bytes: &[u8]| *blake3::hash(bytes).as_bytes();
            let older = images && (piece.older_image || frozen);
            (hash(block.whole), images.then(|| hash(block.image)), older.then(|| hash(block.older_image)))
        });
        for (state, image, older_image) in found {
            hashes.state.push(state);
            hashes.image.extend(image);
            hashes.older_image.extend(older_image);
        }
        Ok(())
    }

    fn put(&self, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
        let path = self.draft.path();
        self.draft.file.write_all_at(bytes, self.data_start + offset).map_err(io("write", path))?;
        self.under_way.add(bytes.len() as u64);
        Ok(())
    }

    fn finish(
        &self,
        plan: &PartPlan<'_>,
        spec: &[u8],
        info: SnapshotInfo,
        hashes: &[Hashes],
    ) -> Result<Part, Fault> {
        let path = self.draft.path();
        let commit = manifest::commit_json(&info.commit).map_err(|error| defect(path, error))?;
        let images = self.images(hashes);
        let found = Found { version: info.version, images, commit_bytes: commit.len() as u64 };
        let mut header = plan.header(found).map_err(|error| defect(path, error))?;
        if !header.pad(self.data_start) {
            return Err(defect(path, "the header is longer than planned"));
        }
        let tail = tail(hashes, images, spec, &commit);
        if header.tail + tail.len() as u64 != header.data {
            return Err(defect(path, "not every block of every shard was hashed"));
        }
        let bytes = self.data_start + header.data;
        self.put(header.tail, &tail)?;
        self.draft.file.set_len(bytes).map_err(io("truncate", path))?;
        self.draft.file.write_all_at(&header.bytes, 0).map_err(io("write", path))?;
        // All parts have the same spec, also where the job's servers are of several tiers.
        let of_all = JobSpec { tier: TierKind::Memory, ..plan.spec.clone() };
        let of_all = serde_json::to_vec(&of_all).map_err(|error| defect(path, error))?;
        Ok(self.entry(plan, info, images, bytes, [&of_all, &commit, &header.bytes, &tail]))
    }

    /// Returns the images of the part, the same for all trained shards. No older image exists at version 0, and after a
    /// restore without one.
    fn images(&self, hashes: &[Hashes]) -> StoredImages {
        if self.job.spec().max_delay == 0 {
            StoredImages::None
        } else if hashes.is_empty()
            || self
                .shards
                .iter()
                .zip(hashes)
                .any(|(&shard, hashes)| !self.job.layout().is_frozen(shard) && hashes.older_image.is_empty())
        {
            StoredImages::Current
        } else {
            StoredImages::Both
        }
    }

    fn entry(
        &self,
        plan: &PartPlan<'_>,
        info: SnapshotInfo,
        images: StoredImages,
        bytes: u64,
        digested: [&[u8]; 4],
    ) -> Part {
        let [spec, commit, header, tail] = digested.map(|bytes| blake3::hash(bytes).to_hex().to_string());
        let shards = plan.shards.iter().map(|&shard| {
            let range = plan.layout.shard_range(shard);
            PartShard { shard, start: range.start, elements: range.end - range.start }
        });
        Part {
            file: Part::file_name(plan.server, plan.servers),
            bytes,
            job: plan.spec.name.clone(),
            server: plan.server,
            servers: plan.servers,
            version: info.version,
            applied: info.applied,
            sequence: self.sequence,
            images,
            spec,
            commit,
            header,
            tail,
            shards: shards.collect(),
        }
    }
}

fn tail(hashes: &[Hashes], images: StoredImages, spec: &[u8], commit: &[u8]) -> Vec<u8> {
    let mut tail = Vec::new();
    let mut table = |rows: fn(&Hashes) -> &Vec<BlockHash>| {
        hashes.iter().flat_map(rows).for_each(|hash| tail.extend_from_slice(hash));
    };
    table(|shard| &shard.state);
    if images != StoredImages::None {
        table(|shard| &shard.image);
    }
    if images == StoredImages::Both {
        table(|shard| &shard.older_image);
    }
    tail.extend_from_slice(spec);
    tail.extend_from_slice(commit);
    tail
}
