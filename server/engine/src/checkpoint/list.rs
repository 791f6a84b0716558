//! Which checkpoints there are, and how old ones go.

use std::{fs, io::ErrorKind, path::Path};

use longshore_proto::{Fault, JobName, Version};

use super::{
    Store,
    fault::io,
    files::sync_folder,
    manifest::{self, Manifest},
};

impl Store {
    /// Sealed checkpoints of a job, by version and then name: oldest first. One whose manifest is damaged is left out,
    /// with a warning, so that it hides no other.
    pub fn list(&self, job: &JobName) -> Result<Vec<(String, Version)>, Fault> {
        let folder = self.dir().join(job.as_str());
        let entries = match fs::read_dir(&folder) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(io("list", &folder))?,
        };
        let mut found = Vec::new();
        for entry in entries {
            let entry = entry.map_err(io("list", &folder))?;
            let name = entry.file_name();
            let Some(name) = name.to_str().filter(|name| JobName::parse("name", name).is_ok()) else {
                continue;
            };
            if !entry.path().join(manifest::FILE).exists() {
                continue;
            }
            match Manifest::read(&entry.path()) {
                Ok(manifest) => found.push((name.to_string(), manifest.version)),
                Err(fault) => tracing::warn!(%job, name, %fault, "a checkpoint is left out of the list"),
            }
        }
        found.sort_by(|(name, version), (other_name, other)| {
            version.cmp(other).then_with(|| name.cmp(other_name))
        });
        Ok(found)
    }

    /// The newest sealed checkpoint.
    pub fn latest(&self, job: &JobName) -> Result<Option<(String, Version)>, Fault> {
        Ok(self.list(job)?.pop())
    }

    /// Removes the oldest sealed checkpoints beyond `keep` (None keeps all), never the newest. Returns what it removed.
    /// Unsealed ones are left alone: a server may be writing them.
    pub fn prune(&self, job: &JobName, keep: Option<usize>) -> Result<Vec<String>, Fault> {
        let Some(keep) = keep else { return Ok(Vec::new()) };
        let listed = self.list(job)?;
        let excess = listed.len().saturating_sub(keep.max(1));
        let mut removed = Vec::with_capacity(excess);
        for (name, version) in listed.into_iter().take(excess) {
            let folder = self.folder(job, &name)?;
            remove(&folder)?;
            tracing::info!(%job, name, %version, "old checkpoint removed");
            removed.push(name);
        }
        Ok(removed)
    }
}

/// The manifest first: a crash in between leaves something unsealed and never a sealed checkpoint without its parts.
fn remove(folder: &Path) -> Result<(), Fault> {
    let manifest = folder.join(manifest::FILE);
    gone(fs::remove_file(&manifest)).map_err(io("remove", &manifest))?;
    match sync_folder(folder) {
        Err(fault) if fault.kind == longshore_proto::FaultKind::NotFound => return Ok(()),
        other => other?,
    }
    gone(fs::remove_dir_all(folder)).map_err(io("remove", folder))
}

/// Servers that share a folder prune it at the same time.
fn gone(result: std::io::Result<()>) -> std::io::Result<()> {
    match result {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        other => other,
    }
}
