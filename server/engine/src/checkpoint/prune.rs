//! The removal of old checkpoints.

use std::{fs, io::ErrorKind, path::Path};

use longshore_proto::{Fault, FaultKind, JobName};

use super::{Store, fault::io, files::sync_folder, manifest};

impl Store {
    /// Removes the checkpoints that were sealed first, beyond `keep` (None keeps all), and returns their
    /// names. `sealed` is never removed: the caller has just sealed it, and other servers that share the
    /// folder may still be about to. Damaged checkpoints are neither counted nor removed. Unsealed ones are
    /// left alone, since a server may be writing them.
    pub fn prune(&self, job: &JobName, keep: Option<usize>, sealed: &str) -> Result<Vec<String>, Fault> {
        let Some(keep) = keep else { return Ok(Vec::new()) };
        let mut others = self.list(job)?;
        others.retain(|listed| listed.damage.is_none() && listed.name != sealed);
        let excess = (others.len() + 1).saturating_sub(keep.max(1));
        let mut removed = Vec::with_capacity(excess);
        for old in others.into_iter().take(excess) {
            remove(&self.folder(job, &old.name)?)?;
            tracing::info!(%job, name = old.name, version = %old.version, "old checkpoint removed");
            removed.push(old.name);
        }
        Ok(removed)
    }
}

/// Removes the manifest first: a crash in between leaves an unsealed checkpoint, and never a sealed one without its
/// parts.
fn remove(folder: &Path) -> Result<(), Fault> {
    let manifest = folder.join(manifest::FILE);
    gone(fs::remove_file(&manifest)).map_err(io("remove", &manifest))?;
    match sync_folder(folder) {
        Err(fault) if fault.kind == FaultKind::NotFound => return Ok(()),
        other => other?,
    }
    gone(fs::remove_dir_all(folder)).map_err(io("remove", folder))
}

/// Takes a missing file for success, since servers that share a folder prune it at the same time.
pub(super) fn gone(result: std::io::Result<()>) -> std::io::Result<()> {
    match result {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        other => other,
    }
}
