//! Files that appear whole or not at all.

use std::{
    collections::hash_map::RandomState,
    fs::{self, File, OpenOptions},
    hash::{BuildHasher, Hasher},
    io::{ErrorKind, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::{
        Arc, LazyLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use longshore_proto::{Fault, FaultKind};
use rustix::{
    fs::{FallocateFlags, fallocate},
    io::Errno,
};

use super::fault::io;

/// Tries to put a file into a folder that others remove while it is empty.
const MOST_TRIES: u32 = 1000;

/// Separates the final name from the suffix that makes a temporary name unique.
const TEMPORARY: &str = ".tmp-";

/// A file under a temporary name. A draft dropped without [`Draft::publish`] leaves nothing behind, and takes
/// its folder with it if that is empty.
pub(super) struct Draft {
    pub(super) file: Arc<File>,
    temporary: PathBuf,
    target: PathBuf,
    /// True once the draft was published or discarded.
    settled: AtomicBool,
}

impl Draft {
    pub(super) fn create(target: PathBuf) -> Result<Draft, Fault> {
        static COUNTER: AtomicU64 = AtomicU64::new(0);
        // Servers of several containers may share the folder, each as process 1.
        static PROCESS: LazyLock<u64> = LazyLock::new(|| RandomState::new().build_hasher().finish());
        let unique = format!("{TEMPORARY}{:x}-{}", *PROCESS, COUNTER.fetch_add(1, Ordering::Relaxed));
        let mut temporary = target.clone().into_os_string();
        temporary.push(unique);
        let temporary = PathBuf::from(temporary);
        let folder = parent(&target);
        // Weights are as private as the training data.
        let open = || OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&temporary);
        let mut tries = 0;
        let file = loop {
            let opened = create_folder(folder).and_then(|()| open().map_err(io("create", &temporary)));
            match opened {
                // Other servers remove the folder whenever they find it empty.
                Err(fault) if fault.kind == FaultKind::NotFound && tries < MOST_TRIES => tries += 1,
                opened => break Arc::new(opened?),
            }
        };
        Ok(Draft { file, temporary, target, settled: AtomicBool::new(false) })
    }

    pub(super) fn path(&self) -> &Path {
        &self.target
    }

    /// Reserves the space of the whole file, so that a full disk is found before it slows training.
    pub(super) fn reserve(&self, bytes: u64) -> Result<(), Fault> {
        match fallocate(&self.file, FallocateFlags::empty(), 0, bytes) {
            Ok(()) => Ok(()),
            Err(Errno::OPNOTSUPP) => {
                tracing::debug!(path = %self.target.display(), "the file system cannot reserve space");
                Ok(())
            }
            Err(error) => Err(io("reserve space", &self.target)(error.into())),
        }
    }

    /// Flushes the bytes, then gives the file its name, then flushes the folder. So a crash cannot leave the
    /// name without the bytes.
    pub(super) fn publish(&self) -> Result<(), Fault> {
        self.file.sync_all().map_err(io("fsync", &self.temporary))?;
        fs::rename(&self.temporary, &self.target).map_err(io("rename", &self.temporary))?;
        self.settled.store(true, Ordering::Relaxed);
        sync_folder(parent(&self.target))
    }

    /// Removes the file unless it is published. Dropping the draft also removes the file, but another thread may hold
    /// the draft for a while.
    pub(super) fn discard(&self) {
        if self.settled.swap(true, Ordering::Relaxed) {
            return;
        }
        if let Err(error) = fs::remove_file(&self.temporary) {
            tracing::warn!(path = %self.temporary.display(), %error, "could not remove an unfinished file");
        }
        remove_empty(parent(&self.target));
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        self.discard();
    }
}

/// Writes a small file whole.
pub(super) fn publish(target: PathBuf, bytes: &[u8]) -> Result<(), Fault> {
    let draft = Draft::create(target)?;
    (&*draft.file).write_all(bytes).map_err(io("write", draft.path()))?;
    draft.publish()
}

/// Removes a folder and the one above it, each only if it is empty.
pub(super) fn remove_empty(folder: &Path) {
    // The system refuses to remove a folder that is not empty.
    let _ = fs::remove_dir(folder).and_then(|()| fs::remove_dir(parent(folder)));
}

/// Removes a killed server's earlier attempts at this file. Only this file's writer may call it.
pub(super) fn remove_drafts(target: &Path) {
    let Some(name) = target.file_name().and_then(|name| name.to_str()) else { return };
    let prefix = format!("{name}{TEMPORARY}");
    for entry in fs::read_dir(parent(target)).into_iter().flatten().flatten() {
        if entry.file_name().to_str().is_some_and(|name| name.starts_with(&prefix)) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

pub(super) fn sync_folder(folder: &Path) -> Result<(), Fault> {
    let opened = File::open(folder).map_err(io("open", folder))?;
    opened.sync_all().map_err(io("fsync", folder))
}

/// Creates a folder and its missing parents, and flushes each new folder's entry into its parent.
fn create_folder(folder: &Path) -> Result<(), Fault> {
    if folder.is_dir() {
        return Ok(());
    }
    let above = parent(folder);
    create_folder(above)?;
    match fs::create_dir(folder) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(io("create folder", folder)(error)),
        _ => sync_folder(above),
    }
}

fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

#[cfg(test)]
mod tests {
    use longshore_proto::FaultKind;

    use super::*;

    #[test]
    fn a_reservation_that_does_not_fit_leaves_nothing_behind() {
        let root = tempfile::tempdir().unwrap();
        let draft = Draft::create(root.path().join("job/name/part")).unwrap();
        let fault = draft.reserve(1 << 62).unwrap_err();
        drop(draft);
        assert_eq!(fault.kind, FaultKind::Exhausted, "{fault}");
        assert!(fault.value.contains("job/name/part"), "{fault}");
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
    }

    #[test]
    fn drafts_of_a_killed_server_are_removed() {
        let root = tempfile::tempdir().unwrap();
        let target = root.path().join("part");
        std::mem::forget(Draft::create(target.clone()).unwrap());
        publish(root.path().join("other"), b"x").unwrap();
        remove_drafts(&target);
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 1);
    }
}
