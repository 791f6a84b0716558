//! `manifest.json`, which makes parts a checkpoint.

use std::{fs::File, io::Read, path::Path};

use longshore_proto::{Commit, Fault, FaultKind, JobSpec, Version};
use serde::{Deserialize, Serialize};

use super::{
    fault::{FIELD, corrupt, defect, io},
    part::Part,
};
use crate::{job::StoredImages, record, retired};

pub(super) const FILE: &str = "manifest.json";
/// Version of the checkpoint format. A change that a reader of the version before would misread raises the number.
pub const FORMAT_VERSION: u32 = 1;
const FORMAT: &str = "longshore-checkpoint";
/// Largest size of a manifest in bytes. A million parameters take 300 MB, and a server has memory for this limit.
const MAX_BYTES: u64 = 1 << 30;
/// Digits that replace the digest while the digest is computed.
const NO_DIGEST: &str = "0000000000000000000000000000000000000000000000000000000000000000";

/// The file, in the order of its fields.
///
/// `format`, `format_version` and `blake3` come first in every version, so that a reader can check format and integrity
/// before the rest. Version and state follow, which people look for. Fields that grow with the model come last.
/// `blake3` is the digest of the file's bytes with its own digits as zeros. So the digest covers every byte, and needs
/// no canonical JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    pub format: String,
    pub format_version: u32,
    pub blake3: String,
    pub version: Version,
    pub applied: u64,
    /// The hash of the whole version, as `longshore status` prints it. None if the sealing server did not see all
    /// parts. A restore verifies blocks either way.
    pub state_hash: Option<String>,
    /// The highest sequence of the parts. Checkpoints are kept and listed in this order, since versions fall when a job
    /// goes back.
    pub sequence: u64,
    pub images: StoredImages,
    /// The parts, in the order of the servers.
    pub parts: Vec<Part>,
    #[serde(with = "record::commit")]
    pub commit: Option<Commit>,
    pub spec: JobSpec,
}

/// The fields that every version has.
#[derive(Deserialize)]
struct Envelope {
    format: String,
    format_version: u32,
    blake3: String,
}

#[derive(Serialize, Deserialize)]
#[serde(transparent)]
struct CommitJson {
    #[serde(with = "record::commit")]
    commit: Option<Commit>,
}

/// The JSON in which parts keep a commit.
pub(super) fn commit_json(commit: &Option<Commit>) -> serde_json::Result<Vec<u8>> {
    serde_json::to_vec(&CommitJson { commit: commit.clone() })
}

pub(super) fn parse_commit(json: impl Read) -> serde_json::Result<Option<Commit>> {
    Ok(serde_json::from_reader::<_, CommitJson>(json)?.commit)
}

/// Readable fields of a damaged manifest, for the checkpoint's place in a list.
#[derive(Deserialize)]
pub(super) struct Hints {
    pub(super) version: Version,
    #[serde(default)]
    pub(super) sequence: u64,
}

impl Hints {
    pub(super) fn read(folder: &Path) -> Hints {
        let bytes = read_file(&folder.join(FILE)).unwrap_or_default();
        serde_json::from_slice(&bytes).unwrap_or(Hints { version: Version(0), sequence: 0 })
    }
}

impl Manifest {
    pub(super) fn new(
        first: &Part,
        parts: Vec<Part>,
        spec: JobSpec,
        commit: Option<Commit>,
        images: StoredImages,
    ) -> Manifest {
        Manifest {
            format: FORMAT.to_string(),
            format_version: FORMAT_VERSION,
            blake3: NO_DIGEST.to_string(),
            version: first.version,
            applied: first.applied,
            state_hash: None,
            sequence: parts.iter().map(|part| part.sequence).max().unwrap_or(0),
            images,
            parts,
            commit,
            spec,
        }
    }

    pub(super) fn encode(&mut self, path: &Path) -> Result<Vec<u8>, Fault> {
        self.blake3 = NO_DIGEST.to_string();
        let blank = serde_json::to_string_pretty(self).map_err(|error| defect(path, error))? + "\n";
        self.blake3 = blake3::hash(blank.as_bytes()).to_hex().to_string();
        // The digest is the first occurrence, since only two short fields precede it.
        Ok(blank.replacen(NO_DIGEST, &self.blake3, 1).into_bytes())
    }

    pub(super) fn read(folder: &Path) -> Result<Manifest, Fault> {
        let path = folder.join(FILE);
        let bytes = read_file(&path)?;
        let place = path.display();
        let bad = |error: serde_json::Error| {
            corrupt(format!("{place} ({error})"), "a manifest, whole and unaltered")
        };
        let envelope: Envelope = serde_json::from_slice(&bytes).map_err(bad)?;
        if envelope.format != FORMAT {
            return Err(corrupt(
                format!("{place} (format {:?})", envelope.format),
                format!("of format {FORMAT:?}"),
            ));
        }
        let found = digest(&bytes, &envelope.blake3);
        if found.as_ref() != Some(&envelope.blake3) {
            let found = found.unwrap_or_default();
            let limit = format!("of BLAKE3 {}, as it was written", envelope.blake3);
            return Err(corrupt(format!("{place} (BLAKE3 {found})"), limit));
        }
        if envelope.format_version != FORMAT_VERSION {
            let value = format!("{place} (format_version {})", envelope.format_version);
            let limit = format!("of format_version {FORMAT_VERSION}");
            let remedy = "restore it with the Longshore version that wrote it, or a newer one";
            return Err(Fault::new(FaultKind::Precondition, FIELD, value, limit, remedy));
        }
        retired::check(&bytes)?;
        let manifest: Manifest = serde_json::from_slice(&bytes).map_err(bad)?;
        let servers = manifest.parts.len() as u32;
        for (server, part) in (0..).zip(&manifest.parts) {
            // Names are compared whole: a name with a path would lead out of the folder.
            if (part.server, part.servers) != (server, servers)
                || part.file != Part::file_name(server, servers)
            {
                let limit = format!("{:?} at this place", Part::file_name(server, servers));
                return Err(corrupt(format!("{place} (part {:?})", part.file), limit));
            }
        }
        Ok(manifest)
    }
}

fn read_file(path: &Path) -> Result<Vec<u8>, Fault> {
    let opened = File::open(path).and_then(|file| file.metadata().map(|metadata| (file, metadata.len())));
    let (file, length) = opened.map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => {
            let limit = "there: without it the checkpoint was never sealed";
            let remedy = "name a sealed checkpoint (ListCheckpoints), or seal this one with what every server's \
                          Checkpoint returned";
            Fault::new(FaultKind::NotFound, FIELD, path.display(), limit, remedy)
        }
        _ => io("open", path)(error),
    })?;
    if length > MAX_BYTES {
        return Err(corrupt(
            format!("{} ({length} bytes)", path.display()),
            format!("at most {MAX_BYTES} bytes"),
        ));
    }
    let mut bytes = Vec::with_capacity(length as usize);
    file.take(MAX_BYTES).read_to_end(&mut bytes).map_err(io("read", path))?;
    Ok(bytes)
}

/// Returns the digest of the bytes with the first occurrence of `digest` blanked. None if it does not occur.
fn digest(bytes: &[u8], digest: &str) -> Option<String> {
    let wanted = digest.as_bytes();
    if wanted.len() != NO_DIGEST.len() {
        return None;
    }
    let at = bytes.windows(wanted.len()).position(|window| window == wanted)?;
    let mut hasher = blake3::Hasher::new();
    hasher.update(&bytes[..at]);
    hasher.update(NO_DIGEST.as_bytes());
    hasher.update(&bytes[at + wanted.len()..]);
    Some(hasher.finalize().to_hex().to_string())
}
