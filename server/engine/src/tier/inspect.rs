//! Inspection of a state directory, whichever tier made it.

use std::{
    fs,
    path::{Path, PathBuf},
};

use longshore_proto::{Fault, FaultKind};

use super::{
    Header, factory,
    fault::{FIELD, conflict, corrupt, io},
    folder::{Folder, name_of},
};
pub use super::{
    report::{Report, VersionReport},
    shm::too_short,
};

/// Returns the folders of jobs at or below `path`. `path` is a state directory, a job's folder in it, or one
/// server's folder in that.
///
/// # Errors
/// `NotFound` when there is none.
pub fn folders(path: &Path) -> Result<Vec<PathBuf>, Fault> {
    let mut found = Vec::new();
    // <state-dir>/<job>/server-<i>-of-<n>
    let mut level = vec![path.to_path_buf()];
    for _ in 0..3 {
        let mut next = Vec::new();
        for folder in level {
            if folder.join("header.json").is_file() {
                found.push(folder);
                continue;
            }
            for entry in fs::read_dir(&folder).map_err(io("list", &folder))? {
                let entry = entry.map_err(io("list", &folder))?.path();
                // A folder that is being made or removed holds nothing.
                if entry.is_dir() && !name_of(&entry).starts_with('~') {
                    next.push(entry);
                }
            }
        }
        level = next;
    }
    found.sort();
    if found.is_empty() {
        let limit = "a folder that a server's --state-dir or --shm-dir named";
        let remedy = "name the state directory, or <state-dir>/<job>/server-<i>-of-<n>";
        return Err(Fault::new(FaultKind::NotFound, FIELD, path.display(), limit, remedy));
    }
    Ok(found)
}

/// Reads and verifies one server's folder of a job.
///
/// # Errors
/// `Conflict` while a server uses it: writes in progress cannot be told from damage.
pub fn inspect(path: &Path) -> Result<Report, Fault> {
    let Some(folder) = Folder::take_to_read(path.to_path_buf())? else {
        let value = format!("{} (in use by another process)", path.display());
        let remedy = "ask the server that uses it with `longshore status`, or stop it first";
        return Err(conflict(value, "used by no server while it is verified", remedy));
    };
    let Some(header) = Header::read(path)? else {
        let value = format!("{} (no header.json)", path.display());
        let remedy = "name <state-dir>/<job>/server-<i>-of-<n>";
        return Err(corrupt(value, "a job's folder in a state directory", remedy));
    };
    factory::inspect(&folder, header)
}
