//! Inspection of a state directory of any tier, for `longshore inspect`, and its report.

use std::{
    fs,
    path::{Path, PathBuf},
};

use longshore_proto::{Fault, FaultKind, Version};

use super::{
    Header, factory,
    fault::{FIELD, conflict, corrupt, io},
    folder::{Folder, name_of},
};

/// Returns the bytes of the job's buffers, which a folder of a tier that keeps them must hold.
pub type KeptBuffers = fn(&Header) -> Result<u64, Fault>;

#[derive(Clone, Debug)]
pub struct Report {
    pub folder: PathBuf,
    pub header: Header,
    /// Number of whole records. A folder has room for four.
    pub records: usize,
    /// The broken records, and why: torn by a crash, or damaged.
    pub broken_records: Vec<String>,
    pub versions: Vec<VersionReport>,
    /// Further damage that a server would refuse.
    pub damage: Vec<String>,
}

#[derive(Clone, Debug)]
pub struct VersionReport {
    pub version: Version,
    pub applied: u64,
    pub state_slot: u8,
    /// Number of blocks that were read and compared, images' blocks too.
    pub blocks: u64,
    /// Bytes that differ from the written ones. Expected in the older version once a step after the newest has begun to
    /// overwrite it.
    pub damaged: Vec<String>,
}

impl Report {
    /// Returns true if a server can continue from these folders without repair.
    pub fn is_whole(&self) -> bool {
        let newest = self.versions.last().is_none_or(|newest| newest.damaged.is_empty());
        // A folder without any record was never loaded, unless broken records show otherwise.
        newest && self.damage.is_empty() && (!self.versions.is_empty() || self.is_blank())
    }

    pub fn is_blank(&self) -> bool {
        self.versions.is_empty() && self.broken_records.is_empty()
    }

    /// Returns the newest whole version.
    pub fn recoverable(&self) -> Option<Version> {
        let whole = self.versions.iter().rev().find(|version| version.damaged.is_empty());
        whole.filter(|_| self.damage.is_empty()).map(|version| version.version)
    }
}

/// Returns the folders of jobs at or below `path`. `path` is a state directory, a job's folder in it, or one
/// server's folder in that.
///
/// # Errors
/// `NotFound` when there is no such folder.
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
                // A folder that is being made or removed holds no job.
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
pub fn inspect(path: &Path, buffers: KeptBuffers) -> Result<Report, Fault> {
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
    factory::inspect(&folder, header, buffers)
}
