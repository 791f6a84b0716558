//! The purpose of a snapshot, which decides how many there may be at once and how long updates wait for its
//! reader.

use std::time::Duration;

use longshore_proto::limits::{MAX_CHECKPOINTS_AT_ONCE, MAX_EXPORTS_AT_ONCE};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// A block's copy is its hash, so the update waits only for hashing, at the speed of memory.
    Hash,
    /// Any client may read, at any speed, so training does not wait for the reader.
    Export,
    /// The job's owner wants the checkpoint, so training waits for the disk if no memory is left to copy to.
    Checkpoint,
}

/// Time that all updates together wait for one reader if no memory is left to copy to.
const GRACE: Duration = Duration::from_millis(100);
/// The same for a disk, which pauses longer than a socket while it writes back.
const DISK_GRACE: Duration = Duration::from_millis(500);
/// Bytes a second that a disk must take. Updates wait for a slower one no longer than its grace. A single
/// spinning disk and a network of 1 Gbit/s are faster.
const DISK_PACE: u64 = 64 * 1024 * 1024;

impl Purpose {
    /// Returns the field that names such snapshots in errors, and the most that a job may have at once on a
    /// server.
    pub(super) fn most(self) -> (&'static str, usize) {
        match self {
            Purpose::Hash => ("state_hashes", usize::MAX),
            Purpose::Export => ("exports", MAX_EXPORTS_AT_ONCE),
            Purpose::Checkpoint => ("checkpoints", MAX_CHECKPOINTS_AT_ONCE),
        }
    }

    /// Returns the time that updates may wait in all for a reader that takes `taken` bytes meanwhile.
    pub(super) fn patience(self, taken: u64) -> Duration {
        match self {
            Purpose::Export => GRACE,
            Purpose::Hash | Purpose::Checkpoint => {
                DISK_GRACE + Duration::from_secs_f64(taken as f64 / DISK_PACE as f64)
            }
        }
    }

    /// The reader's name in errors.
    pub(super) fn reader(self) -> &'static str {
        match self {
            Purpose::Hash => "state_hash.reader",
            Purpose::Export => "export.reader",
            Purpose::Checkpoint => "checkpoint_dir",
        }
    }

    pub(super) fn remedy(self) -> &'static str {
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
