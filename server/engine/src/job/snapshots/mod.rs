//! Snapshots: a version of all shards, copied while training goes on, for a checkpoint, an export or a state hash.

mod kinds;
mod snapshot;
mod staging;

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use longshore_proto::{
    Fault, FaultKind, Step,
    limits::{MAX_CHECKPOINTS_AT_ONCE, MAX_EXPORTS_AT_ONCE},
};

use self::snapshot::Copying;
pub use self::{
    kinds::{BlockCopy, CopiedBlock, Exported},
    snapshot::{Captured, Ended, Snapshot, SnapshotInfo},
    staging::Piece,
};
use super::Job;
use crate::{
    ids::OwnedShard,
    lock,
    step::{Machine, Progress},
};

/// Purpose of a snapshot. The purpose limits the number of such snapshots at once, and the time that updates wait for
/// the reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    /// A block's copy is its hash, so the update waits only for hashing, at the speed of memory.
    Hash,
    /// Any client may read, at any speed, so training barely waits.
    Export,
    /// Training waits for the checkpoint's disk if no memory is left to copy to.
    Checkpoint,
}

/// Time that all updates together wait for one reader if no memory is left to copy to.
const GRACE: Duration = Duration::from_millis(100);
/// Time that updates wait for a checkpoint's disk in the same case. A disk pauses longer than a socket, during
/// write-back.
const DISK_GRACE: Duration = Duration::from_millis(500);
/// Bytes a second that a checkpoint's disk must take. Updates wait for a slower disk only [`DISK_GRACE`]. A single
/// spinning disk and a network of 1 Gbit/s are faster.
const DISK_PACE: u64 = 64 * 1024 * 1024;

impl Purpose {
    /// Returns the field that names such snapshots in errors, and the largest number that a job may have at once.
    fn most(self) -> (&'static str, usize) {
        match self {
            Purpose::Hash => ("state_hashes", usize::MAX),
            Purpose::Export => ("exports", MAX_EXPORTS_AT_ONCE),
            Purpose::Checkpoint => ("checkpoints", MAX_CHECKPOINTS_AT_ONCE),
        }
    }

    /// Returns the time that updates may wait in all for a reader that takes `taken` bytes meanwhile.
    fn patience(self, taken: u64) -> Duration {
        match self {
            Purpose::Export => GRACE,
            Purpose::Hash | Purpose::Checkpoint => {
                DISK_GRACE + Duration::from_secs_f64(taken as f64 / DISK_PACE as f64)
            }
        }
    }

    /// The reader's name in errors.
    fn reader(self) -> &'static str {
        match self {
            Purpose::Hash => "state_hash.reader",
            Purpose::Export => "export.reader",
            Purpose::Checkpoint => "checkpoint_dir",
        }
    }

    fn remedy(self) -> &'static str {
        match self {
            Purpose::Hash => "ask again later",
            Purpose::Export => {
                "export to a faster disk or while training pauses, or raise the server's --memory"
            }
            Purpose::Checkpoint => {
                "see whether the folder's disk answers, checkpoint while training pauses, or raise the server's --memory"
            }
        }
    }
}

/// A job's running snapshots. Their lock is taken while the machine's lock is held, or alone.
#[derive(Default)]
pub struct Snapshots {
    running: Mutex<Vec<Arc<Copying>>>,
    parts: Arc<PartsUnderWay>,
}

impl Snapshots {
    /// Returns the number of exports, checkpoints and state hashes in progress.
    #[expect(clippy::len_without_is_empty, reason = "a count, not a collection")]
    pub fn len(&self) -> usize {
        lock(&self.running).len()
    }

    /// Begins a part of a checkpoint of about `bytes` bytes. The part counts until the returned value is dropped.
    pub(crate) fn begin_part(&self, bytes: u64) -> PartUnderWay {
        self.parts.all.fetch_add(bytes, Relaxed);
        PartUnderWay { of: Arc::clone(&self.parts), written: AtomicU64::new(0), bytes }
    }

    /// Returns the written bytes of checkpoints in progress, and their total. None if no checkpoint is in
    /// progress.
    pub fn checkpoint_progress(&self) -> Option<(u64, u64)> {
        let all = self.parts.all.load(Relaxed);
        (all > 0).then(|| (self.parts.written.load(Relaxed).min(all), all))
    }

    fn add(&self, copying: &Arc<Copying>) -> Result<(), Fault> {
        let mut running = lock(&self.running);
        check_room(&running, copying.purpose)?;
        running.push(Arc::clone(copying));
        Ok(())
    }

    fn remove(&self, copying: &Arc<Copying>) {
        lock(&self.running).retain(|other| !Arc::ptr_eq(other, copying));
    }

    /// Gives the snapshots of the current version its decision, and its shards on this server. Called under the
    /// machine's lock at every decision.
    pub(super) fn tell(&self, machine: &Machine) {
        for snapshot in lock(&self.running).iter().filter(|snapshot| snapshot.version == machine.version()) {
            let Progress { version, applied, last_commit: commit, .. } = machine.progress();
            *lock(&snapshot.info) = Some(SnapshotInfo { version, applied, commit });
            let owned = OwnedShard::all(snapshot.shards());
            if let Err(refusal) = machine.check_answered(Step(version.0)) {
                snapshot.staging.end(refusal.into());
            }
            snapshot.covers(owned.map(|owned| machine.answers_for(owned, Step(version.0))).collect());
        }
    }

    /// Copies the shard's remaining blocks for every snapshot that must be taken before `step` updates the
    /// shard.
    pub(super) fn take_before(&self, job: &Job, owned: OwnedShard, step: Step) {
        let running = lock(&self.running).clone();
        let earlier = |snapshot: &&Arc<Copying>| snapshot.version < step.version() && snapshot.has(owned);
        for snapshot in running.iter().filter(earlier) {
            snapshot.copy_rest(job, owned);
        }
    }
}

impl Job {
    /// Ends all snapshots of a job that is no longer served.
    pub fn end_snapshots(&self, fault: &Fault) {
        let running = lock(&self.snapshots.running).clone();
        for snapshot in running {
            snapshot.staging.end(fault.clone());
        }
        self.protocol.notify();
    }
}

/// Checks that there may be one more snapshot. An ended snapshot counts until its reader has dropped it.
fn check_room(snapshots: &[Arc<Copying>], purpose: Purpose) -> Result<(), Fault> {
    let (field, most) = purpose.most();
    let running = snapshots.iter().filter(|snapshot| snapshot.purpose == purpose).count();
    if running < most {
        return Ok(());
    }
    let (value, limit) =
        (format!("{running} of this job"), format!("fewer than {most} when another is begun"));
    Err(Fault::new(
        FaultKind::Exhausted,
        field,
        value,
        limit,
        "wait until one of them has ended, and try again",
    ))
}

/// The bytes of a job's parts that are being written. Two parts may be in progress, and count together.
#[derive(Default)]
struct PartsUnderWay {
    written: AtomicU64,
    all: AtomicU64,
}

/// A part that is being written.
pub(crate) struct PartUnderWay {
    of: Arc<PartsUnderWay>,
    written: AtomicU64,
    bytes: u64,
}

impl PartUnderWay {
    pub(crate) fn add(&self, bytes: u64) {
        self.written.fetch_add(bytes, Relaxed);
        self.of.written.fetch_add(bytes, Relaxed);
    }
}

impl Drop for PartUnderWay {
    fn drop(&mut self) {
        self.of.all.fetch_sub(self.bytes, Relaxed);
        self.of.written.fetch_sub(self.written.load(Relaxed), Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_count_together_and_leave_nothing() {
        let parts = Snapshots::default();
        assert_eq!(parts.checkpoint_progress(), None);
        let first = parts.begin_part(100);
        first.add(30);
        let second = parts.begin_part(50);
        second.add(5);
        assert_eq!(parts.checkpoint_progress(), Some((35, 150)));
        drop(first);
        assert_eq!(parts.checkpoint_progress(), Some((5, 50)));
        drop(second);
        assert_eq!(parts.checkpoint_progress(), None);
    }
}
