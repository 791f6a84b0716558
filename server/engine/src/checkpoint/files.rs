//! Files that appear whole or not at all: a draft under a temporary name, then a rename.

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

use longshore_proto::Fault;
use rustix::{
    fs::{FallocateFlags, FlockOperation, fallocate, flock},
    io::Errno,
};

use super::fault::io;

/// Number of tries to create a file in a folder that other servers remove while it is empty.
const MOST_TRIES: u32 = 1000;

/// Separates the final name from the suffix that makes a temporary name unique.
const TEMPORARY: &str = ".tmp-";

/// A locked file under a temporary name. A draft dropped without [`Draft::publish`] is removed, and so is its folder if
/// empty.
pub(super) struct Draft {
    pub(super) file: Arc<File>,
    temporary: PathBuf,
    target: PathBuf,
    /// True once the draft was published or discarded.
    settled: AtomicBool,
}

impl Draft {
    /// `sequence` is the checkpoint's sequence, which becomes a part of the draft's name.
    pub(super) fn create(target: PathBuf, sequence: u64) -> Result<Draft, Fault> {
        let mut temporary = target.clone().into_os_string();
        temporary.push(format!("{TEMPORARY}{sequence}-{}", unique()));
        let temporary = PathBuf::from(temporary);
        let folder = parent(&target);
        // Only the owner may read the file, since weights are as private as the training data.
        let open = || OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&temporary);
        let missing = missing_folders(&target);
        let mut tries = 0;
        let file = loop {
            // `AlreadyExists` means a file in the folder's place. `open` then fails, with an error that names the path.
            let made = fs::create_dir_all(folder).or_else(|error| match error.kind() {
                ErrorKind::AlreadyExists => Ok(()),
                _ => Err(error),
            });
            match made.and_then(|()| open()) {
                // Other servers remove the folder whenever they find it empty.
                Err(error) if error.kind() == ErrorKind::NotFound && tries < MOST_TRIES => tries += 1,
                opened => break Arc::new(opened.map_err(io("create", &temporary))?),
            }
        };
        // The lock shows other servers that the draft's process lives. A server that checks for the lock takes it for
        // an instant. On a file system without locks, drafts of a killed server stay.
        let _ = flock(&file, FlockOperation::LockExclusive);
        let draft = Draft { file, temporary, target, settled: AtomicBool::new(false) };
        // No server removes the folders from here on, since the draft is inside. Their names are flushed too. Otherwise
        // a crash could lose a folder together with a flushed file inside.
        missing.iter().try_for_each(|folder| sync_folder(parent(folder)))?;
        Ok(draft)
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

    /// Flushes the bytes, renames the file, then flushes the folder. So a crash cannot leave the name without the
    /// bytes.
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

pub(super) fn publish(target: PathBuf, sequence: u64, bytes: &[u8]) -> Result<(), Fault> {
    let draft = Draft::create(target, sequence)?;
    (&*draft.file).write_all(bytes).map_err(io("write", draft.path()))?;
    draft.publish()
}

/// Removes a folder and the one above it, each only if it is empty.
pub(super) fn remove_empty(folder: &Path) {
    // The system refuses to remove a folder that is not empty.
    let _ = fs::remove_dir(folder).and_then(|()| fs::remove_dir(parent(folder)));
}

/// Returns a suffix that no other process and no other call has.
pub(super) fn unique() -> String {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    // A process number is not unique: servers of several containers may share the folder, each as process 1.
    static PROCESS: LazyLock<u64> = LazyLock::new(|| RandomState::new().build_hasher().finish());
    format!("{:x}-{}", *PROCESS, COUNTER.fetch_add(1, Ordering::Relaxed))
}

/// Returns the sequence of a draft whose process has ended. None for any other file, and on a file system without
/// locks.
pub(super) fn abandoned(path: &Path) -> Option<u64> {
    let (_, unique) = path.file_name()?.to_str()?.rsplit_once(TEMPORARY)?;
    let [sequence, _, _] = unique.split('-').collect::<Vec<_>>().try_into().ok()?;
    // Opened for writing, since NFS locks no other files.
    let file = OpenOptions::new().write(true).open(path).ok()?;
    flock(&file, FlockOperation::NonBlockingLockExclusive).ok()?;
    sequence.parse().ok()
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

/// Returns the folders above `path` that do not exist, the innermost first.
fn missing_folders(path: &Path) -> Vec<PathBuf> {
    let above =
        path.ancestors().skip(1).take_while(|folder| !folder.as_os_str().is_empty() && !folder.is_dir());
    above.map(Path::to_path_buf).collect()
}

pub(super) fn parent(path: &Path) -> &Path {
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
        let draft = Draft::create(root.path().join("job/name/part"), 1).unwrap();
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
        std::mem::forget(Draft::create(target.clone(), 1).unwrap());
        publish(root.path().join("other"), 1, b"x").unwrap();
        remove_drafts(&target);
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 1);
    }

    /// Servers that share a folder remove it when they find it empty.
    #[test]
    fn a_file_begins_in_a_folder_that_others_remove_while_it_is_empty() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("run/name");
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    remove_empty(&folder);
                }
            });
            let drafts = (0..100).map(|_| Draft::create(folder.join("part"), 1).map(drop));
            let drafts = drafts.collect::<Result<Vec<()>, Fault>>();
            over.store(true, Ordering::Relaxed);
            drafts.unwrap();
        });
    }
}
