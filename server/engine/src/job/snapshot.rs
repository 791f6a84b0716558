//! One consistent version of all shards, read while training goes on.
//!
//! A snapshot of version V visits every shard once, as it is at V. A background caller walks the shards in forward
//! order; an update that is about to carry a shard beyond V visits it first. So nothing is copied aside, training is
//! slowed by at most the visitor's own speed, and no memory beyond the visitor's is used.

use std::{
    sync::{Arc, Mutex},
    time::Instant,
};

use longshore_proto::{BlockId, Commit, Fault, FaultKind, ShardId, Step, Version, checksum::BlockHash};

use super::{Job, compute::BLOCK};
use crate::{
    lock,
    step::{Machine, Progress},
    tier::StateRef,
};

/// A shard as it is at the snapshot's version.
pub struct Captured<'a> {
    pub shard: ShardId,
    pub state: StateRef<'a>,
    /// The current image and the one before, which is None at version 0. Empty where an exact job's live on drives.
    pub image: &'a [u8],
    pub older_image: Option<&'a [u8]>,
}

/// What a snapshot was of.
#[derive(Clone, Debug, PartialEq)]
pub struct SnapshotInfo {
    pub version: Version,
    pub applied: u64,
    pub commit: Option<Commit>,
}

type Capture = dyn Fn(usize, Captured<'_>) -> Result<(), Fault> + Send + Sync;

pub(super) struct Snapshot {
    version: Version,
    taken: Vec<Mutex<bool>>,
    capture: Box<Capture>,
    error: Mutex<Option<Fault>>,
    /// Known once the version is decided.
    info: Mutex<Option<SnapshotInfo>>,
}

impl Job {
    /// Visits every owned shard at version `asked`: the current one if that is None; one still to come is waited for, so
    /// that several servers can be asked for the same. Blocks until all are visited. `capture` gets the shard's index among the owned ones; it may run on this thread or on the compute
    /// thread, once for each shard.
    pub fn snapshot(
        &self,
        asked: Option<Version>,
        deadline: Instant,
        capture: Box<Capture>,
    ) -> Result<SnapshotInfo, Fault> {
        let taken = self.owned.iter().map(|_| Mutex::new(false)).collect();
        let snapshot = {
            // Under the machine's lock no commit can pass between reading the version and being registered.
            let machine = lock(&self.machine);
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
            let (error, info) = (Mutex::new(None), Mutex::new(None));
            let snapshot = Arc::new(Snapshot { version, taken, capture, error, info });
            lock(&self.snapshots).push(Arc::clone(&snapshot));
            self.tell_snapshots(&machine);
            snapshot
        };
        let result = self.walk(&snapshot, deadline);
        lock(&self.snapshots).retain(|other| !Arc::ptr_eq(other, &snapshot));
        if let Some(fault) = result.err().or_else(|| lock(&snapshot.error).take()) {
            return Err(fault);
        }
        let info = lock(&snapshot.info).take();
        Ok(info.expect("the walk waited for the version, whose decision told the snapshot"))
    }

    /// Leaves what is known of the current version with the snapshots of it. Called under the machine's lock at every decision.
    pub(super) fn tell_snapshots(&self, machine: &Machine) {
        for snapshot in lock(&self.snapshots).iter().filter(|snapshot| snapshot.version == machine.version())
        {
            let Progress { version, applied, last_commit: commit, .. } = machine.progress();
            *lock(&snapshot.info) = Some(SnapshotInfo { version, applied, commit });
        }
    }

    fn walk(&self, snapshot: &Snapshot, deadline: Instant) -> Result<(), Fault> {
        let remedy = "the job has not come so far: ask for its current version";
        self.wait_until(deadline, "snapshot", remedy, |machine| {
            (machine.version() >= snapshot.version)
                .then_some(())
                .ok_or_else(|| format!("{} of {}", machine.version(), snapshot.version))
        })?;
        for owned in 0..self.owned.len() {
            self.wait_for_shard(owned, snapshot.version, deadline)?;
            self.take(snapshot, owned);
            if lock(&snapshot.error).is_some() {
                return Ok(());
            }
        }
        Ok(())
    }

    fn wait_for_shard(&self, owned: usize, version: Version, deadline: Instant) -> Result<(), Fault> {
        self.wait_until(deadline, "snapshot", "the server is overloaded: try again later", |machine| {
            let reached = machine.shard_version(owned) >= version;
            reached.then_some(()).ok_or_else(|| format!("{} before {version}", self.owned[owned]))
        })
    }

    /// Visits the shard for every snapshot of a version before `step`'s.
    pub(super) fn take_snapshots_before(&self, owned: usize, step: Step) -> Result<(), Fault> {
        let snapshots = lock(&self.snapshots).clone();
        for snapshot in snapshots.iter().filter(|snapshot| snapshot.version < step.version()) {
            self.take(snapshot, owned);
        }
        Ok(())
    }

    fn take(&self, snapshot: &Snapshot, owned: usize) {
        let mut taken = lock(&snapshot.taken[owned]);
        if *taken || lock(&snapshot.error).is_some() {
            return;
        }
        *taken = true;
        let version = snapshot.version;
        let captured = self.with_images(owned, version, |image, older_image| {
            let mut result = Ok(());
            let read = self.tier.read(owned, &mut |state| {
                let captured = Captured { shard: self.owned[owned], state, image, older_image };
                result = (snapshot.capture)(owned, captured);
            });
            read.and(result)
        });
        if let Err(fault) = captured.and_then(|result| result) {
            lock(&snapshot.error).get_or_insert(fault);
        }
    }

    /// Hands the images of a version and of the one before to `with`. An exact job's follow from its state: where they live
    /// on drives they are left there.
    fn with_images<R>(
        &self,
        owned: usize,
        version: Version,
        with: impl FnOnce(&[u8], Option<&[u8]>) -> R,
    ) -> Result<R, Fault> {
        if self.spills_images() && self.spec.max_delay == 0 {
            return Ok(with(&[], None));
        }
        let older = version.0.checked_sub(1).map(Version);
        let current = |older: Option<&[u8]>| {
            self.with_whole_image(owned, version, |image| with(image.unwrap_or_default(), older))
        };
        match older {
            Some(older) => self.with_whole_image(owned, older, current)?,
            None => current(None),
        }
    }

    /// The hash of every block of a captured shard, computed on the update threads.
    pub fn hash_blocks(&self, captured: &Captured<'_>) -> Vec<(BlockId, BlockHash)> {
        let first = self.layout.shard_blocks(captured.shard).start;
        let blocks = (0..captured.state.blocks()).collect();
        self.compute.blocks(blocks, |block: usize| {
            let mut hasher = blake3::Hasher::new();
            for bytes in captured.state.block(block).arrays {
                hasher.update(bytes);
            }
            (BlockId(first + block as u32), *hasher.finalize().as_bytes())
        })
    }

    /// BLAKE3 of each block of an image, computed on the update threads.
    pub fn hash_image(&self, image: &[u8]) -> Vec<BlockHash> {
        let blocks = image.chunks(BLOCK * self.spec.image_dtype.bytes() as usize).collect();
        self.compute.blocks(blocks, |block: &[u8]| *blake3::hash(block).as_bytes())
    }

    /// Block hashes of the current version, in owned order, and which version that is.
    pub fn state_hashes(
        self: &Arc<Self>,
        deadline: Instant,
    ) -> Result<(SnapshotInfo, Vec<(BlockId, BlockHash)>), Fault> {
        let hashes = Arc::new(Mutex::new(Vec::new()));
        let (job, sink) = (Arc::clone(self), Arc::clone(&hashes));
        let capture = move |_: usize, captured: Captured<'_>| {
            let found = job.hash_blocks(&captured);
            lock(&sink).extend(found);
            Ok(())
        };
        let info = self.snapshot(None, deadline, Box::new(capture))?;
        let mut hashes = std::mem::take(&mut *lock(&hashes));
        hashes.sort_by_key(|(block, _)| *block);
        Ok((info, hashes))
    }
}
