//! Leftovers: parts that were never sealed, because another server had no room or their caller died. Such
//! parts take as much room as a checkpoint.

use std::{fs, path::Path};

use longshore_proto::{Fault, JobName};

use super::{Store, fault::io, files, manifest, part::Part, prune::gone, whole};

impl Store {
    /// Removes this server's part of a checkpoint that will not be sealed, for example because another server
    /// could not write its own. A sealed part stays, and a missing one is no error.
    pub fn discard(&self, job: &JobName, name: &str, server: u32, servers: u32) -> Result<(), Fault> {
        self.discard_for(0, job, name, server, servers)
    }

    /// The same for one author of several: the part stays for the others.
    pub fn discard_for(
        &self,
        author: u64,
        job: &JobName,
        name: &str,
        server: u32,
        servers: u32,
    ) -> Result<(), Fault> {
        let folder = self.folder(job, name)?;
        if !self.writers.leave(&folder.join(Part::file_name(server, servers)), author) {
            return Ok(());
        }
        // A server that seals the checkpoint now has seen this part.
        let Some(_lock) = whole::try_lock(&folder) else { return Ok(()) };
        if folder.join(manifest::FILE).exists() {
            return Ok(());
        }
        let part = folder.join(Part::file_name(server, servers));
        for path in [whole::entry_path(&part), part] {
            gone(fs::remove_file(&path)).map_err(io("remove", &path))?;
        }
        files::remove_empty(&folder);
        tracing::info!(%job, name, "part removed: the checkpoint was not sealed");
        Ok(())
    }

    /// Returns names and parts of the unsealed checkpoints in this folder. Drained servers that have a folder
    /// each cannot tell each other their parts. A client that sees all of them can seal them.
    pub fn unsealed(&self, job: &JobName) -> Vec<(String, Part)> {
        let mut found = Vec::new();
        for folder in fs::read_dir(self.dir().join(job.as_str())).into_iter().flatten().flatten() {
            let name = folder.file_name().into_string().unwrap_or_default();
            if JobName::parse("name", &name).is_err() || folder.path().join(manifest::FILE).exists() {
                continue;
            }
            for file in fs::read_dir(folder.path()).into_iter().flatten().flatten() {
                if whole::is_entry(&file.path()) {
                    found.extend(read_entry(&file.path()).map(|part| (name.clone(), part)));
                }
            }
        }
        found
    }

    /// Returns the sequence of the next checkpoint. First removes unsealed checkpoints that are older than a
    /// sealed one, since their callers have gone on to others. An unsealed one as old as the newest stays. A
    /// server may have written it beside the newest and be about to seal it.
    pub(super) fn make_way(&self, job: &JobName) -> Result<u64, Fault> {
        let newest = self.list(job)?.iter().map(|listed| listed.sequence).max().unwrap_or(0);
        for entry in fs::read_dir(self.dir().join(job.as_str())).into_iter().flatten().flatten() {
            let folder = entry.path();
            if is_leftover(&folder, newest) {
                gone(fs::remove_dir_all(&folder)).map_err(io("remove", &folder))?;
                tracing::info!(%job, folder = %folder.display(), "unsealed parts removed: a later checkpoint is sealed");
            }
        }
        Ok(newest + 1)
    }
}

/// Returns true if the folder holds nothing but parts, each with its entry, and all older than `newest`. Any
/// other file may be a server's unfinished work.
fn is_leftover(folder: &Path, newest: u64) -> bool {
    let Ok(entries) = fs::read_dir(folder) else { return false };
    let mut parts = 0;
    for entry in entries {
        let Ok(path) = entry.map(|entry| entry.path()) else { return false };
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            let part = read_entry(&whole::entry_path(&path));
            if part.is_none_or(|part| part.sequence >= newest) {
                return false;
            }
            parts += 1;
        } else if !whole::is_entry(&path) {
            return false;
        }
    }
    parts > 0
}

fn read_entry(path: &Path) -> Option<Part> {
    serde_json::from_slice(&fs::read(path).ok()?).ok()
}
