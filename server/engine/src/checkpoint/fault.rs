//! Faults of checkpoint files: each names the file, the operation, and an operator's remedy.

use std::{fmt, io, path::Path};

use longshore_proto::{Fault, FaultKind};

pub(super) const FIELD: &str = "checkpoint";
const ANOTHER: &str =
    "restore another checkpoint (ListCheckpoints names them), or copy this file again from its source";

/// Returns a function for `map_err` that adds operation and path to an I/O error.
pub(super) fn io(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Fault {
    let path = path.display().to_string();
    move |error| {
        let value = format!("{path} ({doing}: {error})");
        match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
                let remedy = "free space there, as by deleting folders of old checkpoints, or choose another checkpoint folder";
                Fault::new(FaultKind::Exhausted, FIELD, value, "small enough for the file system", remedy)
            }
            io::ErrorKind::NotFound => {
                let remedy = "check the checkpoint folder's path and that its file system is mounted";
                Fault::new(FaultKind::NotFound, FIELD, value, "present", remedy)
            }
            io::ErrorKind::UnexpectedEof => corrupt(value, "as long as the manifest says"),
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                let remedy = "give the server's user the right to read and write the checkpoint folder (--checkpoint-dir)";
                Fault::new(FaultKind::Precondition, FIELD, value, "accessible", remedy)
            }
            io::ErrorKind::NotADirectory => {
                let remedy = "check the checkpoint folder's path: a file is where a folder should be";
                Fault::new(FaultKind::Precondition, FIELD, value, "a folder", remedy)
            }
            _ => {
                let remedy = "see the kernel's log for the device, or choose another checkpoint folder";
                Fault::new(FaultKind::Internal, FIELD, value, "done without an I/O error", remedy)
            }
        }
    }
}

/// Returns the fault of bytes that differ from the written ones.
pub(super) fn corrupt(value: impl fmt::Display, limit: impl fmt::Display) -> Fault {
    Fault::new(FaultKind::Corrupt, FIELD, value, limit, ANOTHER)
}

/// Returns the fault of a defect: the writer made a value that cannot be encoded.
pub(super) fn defect(path: &Path, error: impl fmt::Display) -> Fault {
    let value = format!("{} ({error})", path.display());
    Fault::new(FaultKind::Internal, FIELD, value, "encodable", "report this as a defect of Longshore")
}

/// Returns the refusal of a version after which the number of servers changed. Callers then ask for another version.
pub(super) fn other_servers(asked: u32, servers: u32) -> Fault {
    let (value, limit) = (format!("of {asked} servers"), format!("of {servers}, as many as the job has now"));
    Fault::new(FaultKind::Precondition, "version", value, limit, "checkpoint again, on all of them")
}
