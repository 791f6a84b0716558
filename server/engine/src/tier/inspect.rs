//! What lies in a state directory, whichever tier made it.

use std::{
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
};

use longshore_proto::{Fault, FaultKind, TierKind};

pub use super::nvme::{Report, VersionReport};
use super::{
    Header,
    fault::{FIELD, corrupt, io},
    folder::{Folder, name_of},
    nvme, shm,
};

/// The folders of jobs at or below `path`, which is a state directory, a job's folder in it, or one server's folder in that.
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
                // One that is being made or removed holds nothing.
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

/// Reads and verifies one server's folder of a job. Refused while that server uses it.
pub fn inspect(path: &Path) -> Result<Report, Fault> {
    let folder = Folder::take_existing(path.to_path_buf())?;
    let Some(header) = Header::read(path)? else {
        let value = format!("{} (no header.json)", path.display());
        let remedy = "name <state-dir>/<job>/server-<i>-of-<n>";
        return Err(corrupt(value, "a job's folder in a state directory", remedy));
    };
    match header.tier {
        TierKind::Nvme => nvme::inspect(folder, header),
        TierKind::Shm => shm_records(folder, header),
        TierKind::Memory => Err(corrupt(
            format!("{} (tier memory)", path.display()),
            "tier nvme or shm",
            "the header is not one that a server wrote: restore a checkpoint",
        )),
    }
}

/// A tmpfs needs no checksums of blocks, being memory; the records have their own.
fn shm_records(folder: Folder, header: Header) -> Result<Report, Fault> {
    let mut report = Report {
        folder: folder.path.clone(),
        header,
        records: 0,
        broken_records: Vec::new(),
        versions: Vec::new(),
    };
    let path = folder.path.join("progress");
    let file = match fs::File::open(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(report),
        Err(error) => return Err(io("open", &path)(error)),
    };
    for found in shm::records_of(&file, &path)? {
        match found {
            Ok(record) => {
                report.records += 1;
                report.versions.push(VersionReport {
                    version: record.version,
                    applied: record.applied,
                    epoch: 0,
                    state_slot: 0,
                    blocks: 0,
                    damaged: Vec::new(),
                });
            }
            Err(why) => report.broken_records.push(format!("{} ({why})", path.display())),
        }
    }
    report.versions.sort_by_key(|version| version.version);
    Ok(report)
}
