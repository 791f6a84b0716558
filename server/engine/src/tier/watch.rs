//! Notices that a running job's files were deleted, moved or replaced. Nobody would find later writes to
//! them.

use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use longshore_proto::{Fault, FaultKind};

use super::fault::FIELD;

/// Files by name, as they were when they were opened.
pub(super) struct Watch(Vec<(PathBuf, Identity)>);

/// Device and inode.
type Identity = (u64, u64);

impl Watch {
    /// Watches the files of `names` that exist in the folders.
    pub(super) fn over<'a>(folders: impl Iterator<Item = &'a Path>, names: &[&str]) -> Watch {
        let paths = folders.flat_map(|folder| names.iter().map(|name| folder.join(name)));
        Watch(paths.filter_map(|path| identity(&path).ok().map(|found| (path, found))).collect())
    }

    /// Checks the files, with one system call for each.
    pub(super) fn check(&self) -> Result<(), Fault> {
        let gone = self.0.iter().find(|(path, known)| identity(path).ok() != Some(*known));
        gone.map_or(Ok(()), |(path, _)| Err(removed(path)))
    }
}

fn identity(path: &Path) -> io::Result<Identity> {
    fs::metadata(path).map(|found| (found.dev(), found.ino()))
}

fn removed(path: &Path) -> Fault {
    let value = format!("{} (deleted or moved under the running server)", path.display());
    let remedy = "what is decided from here on would be lost: restart the server with the job's folder as it was, or restore a \
                  checkpoint";
    Fault::new(FaultKind::Internal, FIELD, value, "left alone", remedy)
}
