//! Faults of a state directory. Each names the file, the operation, and an operator's remedy.

use std::{fmt, io, path::Path};

use longshore_proto::{Fault, FaultKind, JobName, ShardId};

pub(super) const FIELD: &str = "state_dir";
/// The setting that names the folder of tier `shm`.
pub(super) const SHM_FIELD: &str = "shm_dir";
const DEVICE: &str = "see the kernel's log for the device; then restart the server, which recovers the last durable \
                      version, or restore a checkpoint elsewhere";

/// Returns a function for `map_err` that adds operation and path to an I/O error.
pub(super) fn io(doing: &'static str, path: &Path) -> impl Fn(io::Error) -> Fault {
    let path = path.display().to_string();
    move |error| {
        let value = format!("{path} ({doing}: {error})");
        match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
                let remedy = "free space there, name more state directories, or add servers";
                Fault::new(FaultKind::Exhausted, FIELD, value, "large enough for the job's state", remedy)
            }
            io::ErrorKind::NotFound => {
                let remedy = "check its path and that its file system is mounted";
                Fault::new(FaultKind::NotFound, FIELD, value, "present", remedy)
            }
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                let remedy = "give the server's user the right to read and write there, or name another folder (--state-dir, --shm-dir)";
                Fault::new(FaultKind::Precondition, FIELD, value, "writable", remedy)
            }
            io::ErrorKind::Unsupported => {
                let remedy = "choose a directory on another file system";
                Fault::new(FaultKind::Precondition, FIELD, value, "on a file system fit for it", remedy)
            }
            _ => Fault::new(FaultKind::Internal, FIELD, value, "done without an I/O error", DEVICE),
        }
    }
}

/// Returns a function that renames a fault's field to the setting that names the folder.
pub(super) fn named(field: &'static str) -> impl Fn(Fault) -> Fault {
    move |fault| if fault.field == FIELD { Fault { field: field.into(), ..fault } } else { fault }
}

/// Returns the fault of bytes that differ from the written ones.
pub(super) fn corrupt(
    value: impl fmt::Display,
    limit: impl fmt::Display,
    remedy: impl Into<String>,
) -> Fault {
    Fault::new(FaultKind::Corrupt, FIELD, value, limit, remedy)
}

/// Returns the fault of a file that belongs to another owner.
pub(super) fn conflict(
    value: impl fmt::Display,
    limit: impl fmt::Display,
    remedy: impl Into<String>,
) -> Fault {
    Fault::new(FaultKind::Conflict, FIELD, value, limit, remedy)
}

pub(super) fn internal(value: impl fmt::Display, limit: impl fmt::Display) -> Fault {
    Fault::new(FaultKind::Internal, FIELD, value, limit, "report this as a defect of Longshore")
}

/// Returns the fault of a shard for which a store of an earlier version has no place.
pub(super) fn without_place(store: impl fmt::Display, shard: ShardId) -> Fault {
    let value = format!("{store} (format 1: without a place for {shard})");
    let remedy = "name servers that are new to the job; or checkpoint it, and restore it on other servers";
    Fault::new(FaultKind::Precondition, FIELD, value, "a store of format 2", remedy)
}

/// Returns the fault that [`without_place`] returns, for the files of a job in a tmpfs.
pub(crate) fn without_place_in_tmpfs(job: &JobName, shard: ShardId) -> Fault {
    named(SHM_FIELD)(without_place(job, shard))
}
