//! Report on a folder of a state directory.

use std::path::PathBuf;

use longshore_proto::Version;

use super::folder::Header;

/// Contents of a folder.
#[derive(Clone, Debug)]
pub struct Report {
    pub folder: PathBuf,
    pub header: Header,
    /// Number of whole records, of four.
    pub records: usize,
    /// The broken records, and why: torn by a crash, or damaged.
    pub broken_records: Vec<String>,
    /// The versions, oldest first.
    pub versions: Vec<VersionReport>,
    /// Further damage that a server would refuse.
    pub damage: Vec<String>,
    /// The bytes of the file with the job's buffers, in tier `shm`. None if there is no file.
    pub buffers: Option<u64>,
}

/// Report on a version that has a record.
#[derive(Clone, Debug)]
pub struct VersionReport {
    pub version: Version,
    pub applied: u64,
    pub epoch: u64,
    pub state_slot: u8,
    /// Number of blocks that were read and compared, images' blocks too.
    pub blocks: u64,
    /// Bytes that differ from the written ones. In the older version this is no damage, once a step after the
    /// newest has begun to overwrite it.
    pub damaged: Vec<String>,
}

impl Report {
    /// Returns true if a server can continue from these folders without repair.
    pub fn is_whole(&self) -> bool {
        let newest = self.versions.last().is_none_or(|newest| newest.damaged.is_empty());
        // A folder without any record was never loaded, unless broken records show that it once had some.
        newest && self.damage.is_empty() && (!self.versions.is_empty() || self.is_blank())
    }

    /// Returns true if nothing was ever loaded.
    pub fn is_blank(&self) -> bool {
        self.versions.is_empty() && self.broken_records.is_empty()
    }

    /// Returns the newest whole version.
    pub fn recoverable(&self) -> Option<Version> {
        let whole = self.versions.iter().rev().find(|version| version.damaged.is_empty());
        whole.filter(|_| self.damage.is_empty()).map(|version| version.version)
    }
}
