//! The seal, which turns parts into a checkpoint. Draining servers need no coordinator: the server that writes the last
//! part finds all of them.

use std::{
    fs::{self, File},
    io::ErrorKind,
    path::{Path, PathBuf},
    sync::mpsc,
    thread,
    time::Duration,
};

use longshore_proto::{
    Fault, FaultKind, JobName, JobSpec, Layout, ShardId, Version,
    checksum::{BlockHash, state_hash},
    limits::BLOCK_ELEMENTS,
};
use rustix::{
    fs::{FlockOperation, flock},
    io::Errno,
};

use super::{
    Store,
    fault::{FIELD, corrupt, io, other_servers},
    files,
    manifest::{self, Manifest},
    part::{Part, Table},
    read::PartReader,
};
use crate::job::StoredImages;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sealed {
    pub path: PathBuf,
    pub version: Version,
    pub parts: u32,
    /// Number of parts in this server's folder: all, if the servers share one.
    pub visible: u32,
}

impl Store {
    /// Checks that `parts`, as every server's [`Store::write`] returned them, are one whole version, and
    /// writes the manifest. Sealing again with the same parts is no error. So a client may retry when a reply
    /// was lost, and servers that share the folder may all seal.
    pub fn seal(&self, job: &JobName, name: &str, parts: &[String]) -> Result<Sealed, Fault> {
        let _lock = lock(&self.folder(job, name)?)?;
        self.seal_locked(job, name, parts)
    }

    /// Seals as `seal` does. The caller has the folder's lock, which keeps parts from being discarded meanwhile.
    pub(super) fn seal_locked(&self, job: &JobName, name: &str, parts: &[String]) -> Result<Sealed, Fault> {
        let folder = self.folder(job, name)?;
        let parts = parse(job, parts)?;
        let Some(first) = parts.first() else {
            return Err(invalid("parts", 0, "one for each server"));
        };
        let readers = visible(&folder, &parts)?;
        let visible = readers.iter().flatten().count() as u32;
        let own = readers.iter().flatten().next().ok_or_else(|| no_part(&folder))?;
        let (spec, commit) = job_of(own)?;
        let layout = spec.validate()?;
        check_shards(&layout, &parts)?;
        let images = check_images(&layout, &parts)?;
        let mut manifest = Manifest::new(first, parts.clone(), spec, commit, images);
        manifest.state_hash = hash_of(&manifest, &layout, &readers)?;
        let path = folder.join(manifest::FILE);
        let bytes = manifest.encode(&path)?;
        if path.exists() {
            let sealed = Manifest::read(&folder)?;
            if sealed.parts == manifest.parts {
                return Ok(sealed_at(path, &manifest, visible));
            }
            let remedy = "choose another name; sealed checkpoints are never overwritten";
            return Err(Fault::new(FaultKind::Conflict, "name", name, "not sealed with other parts", remedy));
        }
        files::publish(path.clone(), manifest.sequence, &bytes)?;
        self.writers.sealed(&folder);
        for part in &manifest.parts {
            // The manifest has the entries now, so an entry's file that stays does no harm.
            let _ = fs::remove_file(entry_path(&folder.join(&part.file)));
        }
        tracing::info!(%job, name, version = %manifest.version, state_hash = ?manifest.state_hash, "checkpoint sealed");
        Ok(sealed_at(path, &manifest, visible))
    }

    /// Seals checkpoint `name` if it is not sealed and the parts of all its servers are in this folder.
    /// Returns false if some are missing, as with a folder for each host.
    pub fn seal_if_whole(&self, job: &JobName, name: &str, servers: u32) -> Result<bool, Fault> {
        let folder = self.folder(job, name)?;
        let _lock = lock(&folder)?;
        if folder.join(manifest::FILE).exists() {
            // The checkpoint is sealed, but its parts may lie in other folders, or be gone.
            return Ok((0..servers).all(|server| folder.join(Part::file_name(server, servers)).exists()));
        }
        let mut parts = Vec::new();
        for server in 0..servers {
            let part = folder.join(Part::file_name(server, servers));
            let path = entry_path(&part);
            if !part.exists() {
                // The entry is written before its part, so an entry alone does not count.
                return Ok(false);
            }
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

/// Returns the path of a part's own entry, which is needed until the manifest has the entry.
pub(super) fn entry_path(part: &Path) -> PathBuf {
    part.with_extension("part.json")
}

pub(super) fn is_entry(path: &Path) -> bool {
    path.to_str().is_some_and(|path| path.ends_with(".part.json"))
}

/// Longest wait for a folder's lock. All servers that share a folder seal one after the other.
const LOCK_PATIENCE: Duration = Duration::from_secs(600);

/// Locks a checkpoint's parts against removal during the seal. Waits while others seal or remove parts. Returns None
/// where the file system has no locks; nothing protects the parts then.
///
/// # Errors
/// `Deadline` if the folder's file system is silent, or another process keeps the lock.
pub(super) fn lock(folder: &Path) -> Result<Option<File>, Fault> {
    lock_within(LOCK_PATIENCE, folder)
}

fn lock_within(patience: Duration, folder: &Path) -> Result<Option<File>, Fault> {
    let (sender, receiver) = mpsc::channel();
    let path = folder.to_path_buf();
    // A call to a network file system without its server cannot be interrupted, so a thread goes on waiting.
    let wait = move || {
        let opened = File::open(path).ok();
        let locked = opened.filter(|folder| flock(folder, FlockOperation::LockExclusive).is_ok());
        let _ = sender.send(locked);
    };
    thread::Builder::new().name("folder-lock".to_string()).spawn(wait).map_err(io("lock", folder))?;
    receiver.recv_timeout(patience).map_err(|_| {
        let limit = format!("locked within {} s", patience.as_secs());
        let remedy =
            "see with `lslocks` which process keeps the folder's lock, and that its file system answers";
        Fault::new(FaultKind::Deadline, FIELD, folder.display(), limit, remedy)
    })
}

/// Locks as `lock` does, without a wait. Returns None while another server has the lock, and `Some(None)` where no lock
/// can be had.
pub(super) fn try_lock(folder: &Path) -> Option<Option<File>> {
    let Ok(folder) = File::open(folder) else { return Some(None) };
    match flock(&folder, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Some(Some(folder)),
        Err(Errno::WOULDBLOCK) => None,
        Err(_) => Some(None),
    }
}

fn sealed_at(path: PathBuf, manifest: &Manifest, visible: u32) -> Sealed {
    Sealed { path, version: manifest.version, parts: manifest.parts.len() as u32, visible }
}

fn invalid(field: impl Into<String>, value: impl std::fmt::Display, limit: impl std::fmt::Display) -> Fault {
    Fault::invalid(
        field,
        value,
        limit,
        "send what Checkpoint returned on every server, each once, for one name",
    )
}

fn parse(job: &JobName, texts: &[String]) -> Result<Vec<Part>, Fault> {
    let mut parts = Vec::with_capacity(texts.len());
    for (index, text) in texts.iter().enumerate() {
        let field = |name: &str| format!("parts[{index}].{name}");
        let part: Part = serde_json::from_str(text)
            .map_err(|error| invalid(format!("parts[{index}]"), error, "a part as Checkpoint returned it"))?;
        if part.job != *job {
            return Err(invalid(field("job"), &part.job, format!("{job}, the job to seal")));
        }
        if part.servers as usize != texts.len() {
            return Err(other_servers(texts.len() as u32, part.servers));
        }
        if part.server >= part.servers {
            return Err(invalid(field("server"), part.server, format!("below {}", part.servers)));
        }
        // The comparison also keeps a part from naming a file in another folder.
        let expected = Part::file_name(part.server, part.servers);
        if part.file != expected {
            return Err(invalid(field("file"), format!("{:?}", part.file), expected));
        }
        parts.push(part);
    }
    parts.sort_by_key(|part| part.server);
    parts.iter().enumerate().try_for_each(|(index, part)| check_agreement(index, part, &parts[0]))?;
    Ok(parts)
}

fn check_agreement(index: usize, part: &Part, first: &Part) -> Result<(), Fault> {
    if part.server as usize != index {
        return Err(invalid("parts", format!("without server {index}"), "one for each server, each once"));
    }
    let fields = [
        ("version", part.version.0.to_string(), first.version.0.to_string()),
        ("applied", part.applied.to_string(), first.applied.to_string()),
        ("spec", part.spec.clone(), first.spec.clone()),
        ("commit", part.commit.clone(), first.commit.clone()),
    ];
    for (field, theirs, ours) in fields {
        if theirs != ours {
            let limit = format!("{ours}, as on server 0");
            let remedy = "the servers wrote different versions: checkpoint again, naming the version";
            let field = format!("parts[{index}].{field}");
            return Err(Fault::new(FaultKind::Conflict, field, theirs, limit, remedy));
        }
    }
    Ok(())
}

/// The parts that lie in this host's folder, with header and hashes verified.
fn visible(folder: &Path, parts: &[Part]) -> Result<Vec<Option<PartReader>>, Fault> {
    let open = |part: &Part| match PartReader::open(folder, part) {
        Ok(reader) => Ok(Some(reader)),
        Err(fault) if fault.kind == FaultKind::NotFound => Ok(None),
        Err(fault) => Err(fault),
    };
    parts.iter().map(open).collect()
}

fn no_part(folder: &Path) -> Fault {
    let limit = "a folder with at least this server's part";
    let remedy = "call Checkpoint on this server first, with the same name; where that was done, another checkpoint sealed \
                  since has had this one removed: keep more of them (--checkpoint-keep)";
    Fault::new(FaultKind::NotFound, FIELD, folder.display(), limit, remedy)
}

fn job_of(own: &PartReader) -> Result<(JobSpec, Option<longshore_proto::Commit>), Fault> {
    let bad =
        |error: serde_json::Error| corrupt(format!("{} (job: {error})", own.path().display()), "readable");
    Ok((
        serde_json::from_reader(own.spec()?).map_err(bad)?,
        manifest::parse_commit(own.commit()?).map_err(bad)?,
    ))
}

/// Checks that the parts have every shard of the layout once, at its place in the flat space.
pub(super) fn check_shards(layout: &Layout, parts: &[Part]) -> Result<(), Fault> {
    let mut seen = vec![false; layout.shards() as usize];
    for (index, part) in parts.iter().enumerate() {
        for entry in &part.shards {
            let field = format!("parts[{index}].shards");
            let Some(seen) = seen.get_mut(entry.shard.index()) else {
                return Err(invalid(field, entry.shard, format!("below {}", layout.shards())));
            };
            let range = layout.shard_range(entry.shard);
            if (entry.start, entry.elements) != (range.start, range.end - range.start) {
                let value = format!("{} at {}, {} elements", entry.shard, entry.start, entry.elements);
                return Err(invalid(field, value, format!("at {}..{}", range.start, range.end)));
            }
            if std::mem::replace(seen, true) {
                return Err(invalid(field, format!("{} twice", entry.shard), "every shard once"));
            }
        }
    }
    match seen.iter().position(|seen| !seen) {
        Some(missing) => {
            Err(invalid("parts", format!("without {}", ShardId(missing as u32)), "every shard once"))
        }
        None => Ok(()),
    }
}

/// Returns the images that all parts with images have in common.
pub(super) fn check_images(layout: &Layout, parts: &[Part]) -> Result<StoredImages, Fault> {
    let trained = |part: &&Part| part.shards.iter().any(|entry| !layout.is_frozen(entry.shard));
    let mut images = parts.iter().filter(trained).map(|part| part.images);
    let first = images.next().unwrap_or(StoredImages::None);
    match images.find(|&other| other != first) {
        Some(other) => {
            Err(invalid("parts.images", format!("{other:?}"), format!("{first:?} on every server")))
        }
        None => Ok(first),
    }
}

fn hash_of(
    manifest: &Manifest,
    layout: &Layout,
    readers: &[Option<PartReader>],
) -> Result<Option<String>, Fault> {
    let mut hashes: Vec<BlockHash> = vec![[0; 32]; layout.blocks() as usize];
    for (part, reader) in manifest.parts.iter().zip(readers) {
        let Some(reader) = reader else { return Ok(None) };
        for entry in &part.shards {
            let first = entry.start / BLOCK_ELEMENTS;
            for block in 0..entry.elements / BLOCK_ELEMENTS {
                hashes[(first + block) as usize] = reader.hash(Table::State, entry.shard, block)?;
            }
        }
    }
    Ok(Some(state_hash(manifest.version, manifest.applied, &hashes)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_for_a_folder_that_another_process_keeps_ends() {
        let folder = tempfile::tempdir().unwrap();
        let kept = lock(folder.path()).unwrap();
        let fault = lock_within(Duration::ZERO, folder.path()).unwrap_err();
        assert_eq!((fault.kind, fault.value), (FaultKind::Deadline, folder.path().display().to_string()));
        drop(kept);
        assert!(lock(folder.path()).unwrap().is_some());
        assert!(lock(&folder.path().join("missing")).unwrap().is_none());
    }
}
