//! The scope of `longshore doctor`.

use std::path::PathBuf;

use crate::access::Access;

/// The hosts, folders and servers to check.
pub(crate) struct Look<'a> {
    /// Root of the kernel's own files: `/`, or a copy.
    pub(crate) system: PathBuf,
    pub(crate) state_dirs: &'a [PathBuf],
    pub(crate) servers: &'a [String],
    pub(crate) access: &'a Access,
    /// True to measure drives and links too. For the links, a job is opened on each server and deleted again.
    pub(crate) speed: bool,
}
