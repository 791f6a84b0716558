//! What is to be looked at.

use std::path::PathBuf;

use crate::access::Access;

/// What is to be looked at.
pub(crate) struct Look<'a> {
    /// Where the kernel's own files are: `/`, or a copy of them.
    pub(crate) system: PathBuf,
    pub(crate) state_dirs: &'a [PathBuf],
    pub(crate) servers: &'a [String],
    pub(crate) access: &'a Access,
    /// Also how fast the drives of state directories are, and the links to servers, for which a job is opened there and deleted again.
    pub(crate) speed: bool,
}
