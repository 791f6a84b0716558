//! Sealing without a coordinator. Draining servers write their parts one by one, and the last one finds all
//! of them.

use std::{
    fs::{self, File},
    io::ErrorKind,
    path::{Path, PathBuf},
};

use longshore_proto::{Fault, JobName};
use rustix::{
    fs::{FlockOperation, flock},
    io::Errno,
};

use super::{Store, fault::io, manifest, part::Part};

/// Path of a part's own manifest entry, until the manifest has it.
pub(super) fn entry_path(part: &Path) -> PathBuf {
    part.with_extension("part.json")
}

pub(super) fn is_entry(path: &Path) -> bool {
    path.to_str().is_some_and(|path| path.ends_with(".part.json"))
}

/// Locks a checkpoint's parts against removal while it is sealed. Waits for others that seal or remove parts,
/// for as long as they read or remove files. None where the file system has no locks: servers that seal and
/// remove at once are then not kept apart.
pub(super) fn lock(folder: &Path) -> Option<File> {
    let folder = File::open(folder).ok()?;
    flock(&folder, FlockOperation::LockExclusive).ok().map(|()| folder)
}

/// The same without a wait: None while another server seals the checkpoint.
pub(super) fn try_lock(folder: &Path) -> Option<Option<File>> {
    let Ok(folder) = File::open(folder) else { return Some(None) };
    match flock(&folder, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Some(Some(folder)),
        Err(Errno::WOULDBLOCK) => None,
        Err(_) => Some(None),
    }
}

impl Store {
    /// Seals checkpoint `name` if it is not sealed and the parts of all its servers are in this folder.
    /// Returns false if some are missing, as with a folder for each host.
    pub fn seal_if_whole(&self, job: &JobName, name: &str, servers: u32) -> Result<bool, Fault> {
        let folder = self.folder(job, name)?;
        let _lock = lock(&folder);
        if folder.join(manifest::FILE).exists() {
            // Its parts may lie in other folders, or be gone.
            return Ok((0..servers).all(|server| folder.join(Part::file_name(server, servers)).exists()));
        }
        let mut parts = Vec::new();
        for server in 0..servers {
            let path = entry_path(&folder.join(Part::file_name(server, servers)));
            match fs::read_to_string(&path) {
                Ok(part) => parts.push(part),
                Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
                Err(error) => return Err(io("read", &path)(error)),
            }
        }
        self.seal_locked(job, name, &parts)?;
        Ok(true)
    }
}
