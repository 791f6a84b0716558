//! Snapshots: a version of all shards is copied while training goes on, for a checkpoint, an export or a state hash.

mod export;
mod hash;
mod parts;
mod purpose;
mod snapshot;
mod staging;
mod whole_state;

use std::sync::{Arc, Mutex};

use longshore_proto::{Fault, FaultKind, Step};

pub(crate) use self::parts::{PartUnderWay, PartsUnderWay};
pub use self::{
    export::Exported,
    snapshot::{Captured, Ended, Snapshot, SnapshotInfo},
    staging::Piece,
    whole_state::{BlockCopy, CopiedBlock},
};
use self::{purpose::Purpose, snapshot::Copying};
use super::Job;
use crate::{
    ids::OwnedShard,
    lock,
    step::{Machine, Progress},
};

/// A job's running snapshots. Their lock is taken under the machine's, or alone.
#[derive(Default)]
pub(super) struct Snapshots {
    running: Mutex<Vec<Arc<Copying>>>,
}

impl Snapshots {
    pub(super) fn len(&self) -> usize {
        lock(&self.running).len()
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

    /// Tells the snapshots of the current version how it was decided. Called under the machine's lock at
    /// every decision.
    pub(super) fn tell(&self, machine: &Machine) {
        for snapshot in lock(&self.running).iter().filter(|snapshot| snapshot.version == machine.version()) {
            let Progress { version, applied, last_commit: commit, .. } = machine.progress();
            *lock(&snapshot.info) = Some(SnapshotInfo { version, applied, commit });
        }
    }

    /// Copies the shard's remaining blocks for every snapshot that must be taken before `step` updates the
    /// shard.
    pub(super) fn take_before(&self, job: &Job, owned: OwnedShard, step: Step) {
        let running = lock(&self.running).clone();
        for snapshot in running.iter().filter(|snapshot| snapshot.version < step.version()) {
            snapshot.copy_rest(job, owned);
        }
    }
}

impl Job {
    /// Ends all snapshots, since the job is not served any more.
    pub fn end_snapshots(&self, fault: &Fault) {
        let running = lock(&self.snapshots.running).clone();
        for snapshot in running {
            snapshot.staging.end(fault.clone());
        }
        self.notify();
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
