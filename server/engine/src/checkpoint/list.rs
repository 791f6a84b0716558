//! List of a job's checkpoints, in the order in which they were made, with their damage.

use std::{
    fs,
    io::ErrorKind,
    path::Path,
    time::{Duration, SystemTime},
};

use longshore_proto::{Fault, FaultKind, JobName, Version};

use super::{
    Store,
    fault::{corrupt, io},
    manifest::{self, Hints, Manifest},
    part::Part,
};

#[derive(Clone, Debug, PartialEq)]
pub struct Listed {
    pub name: String,
    /// A damaged checkpoint's version is taken from the readable part of its manifest.
    pub version: Version,
    /// See [`Manifest::sequence`].
    pub sequence: u64,
    pub state_hash: Option<String>,
    pub parts: u32,
    /// Servers with parts in this folder.
    pub visible: Vec<u32>,
    /// True if the job has gone back since. Then a checkpoint that was sealed later has another state, and no higher
    /// version.
    pub stale: bool,
    /// The fault that prevents a restore from this folder.
    pub damage: Option<Fault>,
    /// Time at which the manifest was written, by the file system's clock.
    sealed_at: Duration,
}

impl Store {
    /// Returns the sealed checkpoints of a job in the order of their seals. Versions are in another order once a job
    /// has gone back. Damaged checkpoints are included, so that a caller that takes an older one can say why.
    pub fn list(&self, job: &JobName) -> Result<Vec<Listed>, Fault> {
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
            found.extend(look(&entry.path(), name));
        }
        sort(&mut found);
        mark_stale(&mut found);
        Ok(found)
    }
}

/// Returns None if the checkpoint is not sealed, or is being removed by a server that shares the folder.
fn look(folder: &Path, name: &str) -> Option<Listed> {
    let path = folder.join(manifest::FILE);
    let modified = fs::metadata(&path).and_then(|metadata| metadata.modified()).ok()?;
    let sealed_at = modified.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let listed = Listed {
        name: name.to_string(),
        version: Version(0),
        sequence: 0,
        state_hash: None,
        parts: 0,
        visible: Vec::new(),
        stale: false,
        damage: None,
        sealed_at,
    };
    match Manifest::read(folder) {
        Ok(manifest) => Some(whole(listed, folder, &manifest)),
        Err(fault) if fault.kind == FaultKind::NotFound => None,
        Err(fault) => {
            let Hints { version, sequence } = Hints::read(folder);
            Some(Listed { version, sequence, damage: Some(fault), ..listed })
        }
    }
}

/// Adds the parts in this folder, and damage that their lengths show. Only a restore compares bytes with hashes.
fn whole(listed: Listed, folder: &Path, manifest: &Manifest) -> Listed {
    let (mut visible, mut damage) = (Vec::new(), None);
    for part in &manifest.parts {
        match check_length(folder, part) {
            Ok(true) => visible.push(part.server),
            Ok(false) => {}
            Err(fault) => damage = damage.or(Some(fault)),
        }
    }
    Listed {
        version: manifest.version,
        sequence: manifest.sequence,
        state_hash: manifest.state_hash.clone(),
        parts: manifest.parts.len() as u32,
        visible,
        damage,
        ..listed
    }
}

fn check_length(folder: &Path, part: &Part) -> Result<bool, Fault> {
    let path = folder.join(&part.file);
    match fs::metadata(&path) {
        Ok(metadata) if metadata.len() == part.bytes => Ok(true),
        Ok(metadata) => Err(corrupt(
            format!("{} ({} bytes)", path.display(), metadata.len()),
            format!("{} bytes", part.bytes),
        )),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(io("look at", &path)(error)),
    }
}

/// Sorts by sequence. An unreadable manifest is placed by its file's time.
fn sort(found: &mut Vec<Listed>) {
    let lost = |listed: &mut Listed| listed.damage.is_some() && listed.sequence == 0;
    let unplaced: Vec<Listed> = found.extract_if(.., lost).collect();
    found.sort_by(|one, other| {
        let key = |listed: &Listed| (listed.sequence, listed.version);
        key(one).cmp(&key(other)).then_with(|| one.name.cmp(&other.name))
    });
    for mut listed in unplaced {
        let before = found.iter().rposition(|other| other.sealed_at <= listed.sealed_at);
        listed.sequence = before.map_or(0, |at| found[at].sequence);
        found.insert(before.map_or(0, |at| at + 1), listed);
    }
}

/// Marks checkpoints that a rollback left behind. Versions rise along one lineage, so a checkpoint is stale if a later
/// one has no higher version.
fn mark_stale(found: &mut [Listed]) {
    let mut later: Option<(Version, Option<String>)> = None;
    for listed in found.iter_mut().rev().filter(|listed| listed.damage.is_none()) {
        let Some((least, hash)) = &later else {
            later = Some((listed.version, listed.state_hash.clone()));
            continue;
        };
        let same = listed.state_hash.is_some() && listed.state_hash == *hash;
        listed.stale = listed.version > *least || listed.version == *least && !same;
        if listed.version < *least {
            later = Some((listed.version, listed.state_hash.clone()));
        }
    }
}
