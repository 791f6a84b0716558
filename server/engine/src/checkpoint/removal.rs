//! The removal of old checkpoints, and of parts that were never sealed. A part stays unsealed if another server had no
//! room, or the caller or a server died. Such parts take as much room as a checkpoint.

use std::{fs, io::ErrorKind, path::Path};

use longshore_proto::{Fault, JobName};

use super::{
    Store,
    fault::io,
    files, manifest,
    part::Part,
    seal::{entry_path, is_entry, lock, try_lock},
};

/// Prefix of folders in removal, which no checkpoint's name has.
const REMOVED: &str = ".removed-";

impl Store {
    /// Removes the checkpoints that were sealed first, beyond `keep` (None keeps all), and returns their names. The
    /// caller has just sealed `sealed`, which stays: other servers that share the folder may be about to seal it too.
    /// Damaged checkpoints are neither counted nor removed. Unsealed ones stay, since a server may be writing them. A
    /// failure is a warning, since `sealed` is whole.
    pub fn prune(&self, job: &JobName, keep: Option<usize>, sealed: &str) -> Vec<String> {
        let Some(keep) = keep else { return Vec::new() };
        let folder = self.dir().join(job.as_str());
        let warn = |folder: &Path, fault: &Fault| {
            tracing::warn!(%job, folder = %folder.display(), %fault, "an old checkpoint may remain; the next one tries again");
        };
        let listed = self.list(job).inspect_err(|fault| warn(&folder, fault));
        let mut others = listed.unwrap_or_default();
        others.retain(|listed| listed.damage.is_none() && listed.name != sealed);
        let excess = (others.len() + 1).saturating_sub(keep.max(1));
        let mut removed = Vec::with_capacity(excess);
        for old in others.into_iter().take(excess) {
            let folder = folder.join(&old.name);
            if remove(&folder).inspect_err(|fault| warn(&folder, fault)) == Ok(true) {
                tracing::info!(%job, name = old.name, version = %old.version, "old checkpoint removed");
                removed.push(old.name);
            }
        }
        removed
    }

    /// Removes this server's part of a checkpoint that will not be sealed. A part stays if it is sealed or has other
    /// authors. A missing part is no error.
    pub fn discard(
        &self,
        author: u64,
        job: &JobName,
        name: &str,
        server: u32,
        servers: u32,
    ) -> Result<(), Fault> {
        let folder = self.folder(job, name)?;
        let part = folder.join(Part::file_name(server, servers));
        // Another server may seal the checkpoint now. Or it discards its own part, which can take a while on a disk.
        let _lock = lock(&folder)?;
        if !self.writers.leave(&part, author) {
            return Ok(());
        }
        remove_part(&folder, &part)?;
        Ok(())
    }

    /// Returns names and parts of the unsealed checkpoints in this folder. Drained servers with a folder each do not
    /// see each other's parts. A client that asks all of them can seal the checkpoint.
    pub fn unsealed(&self, job: &JobName) -> Vec<(String, Part)> {
        let mut found = Vec::new();
        for folder in fs::read_dir(self.dir().join(job.as_str())).into_iter().flatten().flatten() {
            let name = folder.file_name().into_string().unwrap_or_default();
            if JobName::parse("name", &name).is_err() || folder.path().join(manifest::FILE).exists() {
                continue;
            }
            for file in fs::read_dir(folder.path()).into_iter().flatten().flatten() {
                if is_entry(&file.path()) {
                    // The entry is written first, so its part may be missing.
                    let part =
                        read_entry(&file.path()).filter(|part| folder.path().join(&part.file).exists());
                    found.extend(part.map(|part| (name.clone(), part)));
                }
            }
        }
        found
    }

    /// Returns the sequence of the next checkpoint. First removes unsealed checkpoints that are older than a sealed
    /// one, since their callers have gone on to others. An unsealed one as old as the newest stays: a server may be
    /// about to seal it.
    pub(super) fn make_way(&self, job: &JobName) -> Result<u64, Fault> {
        let newest = self.list(job)?.iter().map(|listed| listed.sequence).max().unwrap_or(0);
        for entry in fs::read_dir(self.dir().join(job.as_str())).into_iter().flatten().flatten() {
            let folder = entry.path();
            if entry.file_name().to_str().is_some_and(|name| name.starts_with(REMOVED)) {
                clear(&folder);
            } else if is_leftover(&folder, newest) && remove(&folder)? {
                tracing::info!(%job, folder = %folder.display(), "unsealed parts removed: a later checkpoint is sealed");
            }
        }
        Ok(newest + 1)
    }
}

/// Removes a part unless its checkpoint is sealed, which returns false. The caller has the folder's lock.
pub(super) fn remove_part(folder: &Path, part: &Path) -> Result<bool, Fault> {
    if folder.join(manifest::FILE).exists() {
        return Ok(false);
    }
    for path in [part, &entry_path(part)] {
        gone(fs::remove_file(path)).map_err(io("remove", path))?;
    }
    files::remove_empty(folder);
    tracing::info!(part = %part.display(), "part removed: the checkpoint was not sealed");
    Ok(true)
}

/// Renames the folder before its removal. So a crash during the removal leaves no checkpoint that lacks parts. Returns
/// false while another server seals or removes the checkpoint.
fn remove(folder: &Path) -> Result<bool, Fault> {
    let Some(_lock) = try_lock(folder) else { return Ok(false) };
    let name = folder.file_name().unwrap_or_default().to_string_lossy();
    let removed = folder.with_file_name(format!("{REMOVED}{name}-{}", files::unique()));
    // Some mounts cannot rename a folder, which is then removed under its old name.
    let removed = fs::rename(folder, &removed).map_or_else(|_| folder.to_path_buf(), |()| removed);
    files::sync_folder(files::parent(folder))?;
    clear(&removed);
    Ok(true)
}

/// Removes a renamed folder. A failure, as of files that NFS keeps for a reader, is tried again with the next
/// checkpoint.
fn clear(removed: &Path) {
    if let Err(error) = gone(fs::remove_dir_all(removed)) {
        tracing::warn!(folder = %removed.display(), %error, "an old checkpoint takes room still; the next one tries again");
    }
}

/// Takes a missing file for success, since servers that share a folder prune at the same time.
fn gone(result: std::io::Result<()>) -> std::io::Result<()> {
    match result {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Returns true if the folder holds only entries, parts with entries, and drafts of ended processes, all older than
/// `newest`. Any other file may be a server's unfinished work, or another program's.
fn is_leftover(folder: &Path, newest: u64) -> bool {
    let Ok(entries) = fs::read_dir(folder) else { return false };
    let mut found = false;
    for entry in entries {
        let Ok(path) = entry.map(|entry| entry.path()) else { return false };
        let of_entry = |path: &Path| read_entry(path).map(|part| part.sequence);
        let sequence = if is_entry(&path) {
            of_entry(&path)
        } else if path.extension().is_some_and(|extension| extension == "safetensors") {
            of_entry(&entry_path(&path))
        } else {
            files::abandoned(&path)
        };
        if sequence.is_none_or(|sequence| sequence >= newest) {
            return false;
        }
        found = true;
    }
    found
}

fn read_entry(path: &Path) -> Option<Part> {
    serde_json::from_slice(&fs::read(path).ok()?).ok()
}
