//! Report on a folder of a state directory.

use std::path::PathBuf;

use longshore_proto::Version;

use super::folder::Header;

/// Contents of a folder.
#[derive(Clone, Debug)]
pub struct Report {
    pub folder: PathBuf,
    pub header: Header,
    /// How many of the four records are whole.
    pub records: usize,
    /// The records that are not whole, and why: torn by a crash, or damaged.
    pub broken_records: Vec<String>,
    /// The versions, oldest first.
    pub versions: Vec<VersionReport>,
    /// Further damage that a server would refuse.
    pub damage: Vec<String>,
    /// In tier `shm`, the bytes of the file that holds the job's buffers; None where there is none.
    pub buffers: Option<u64>,
}

/// Report on a version that has a record.
#[derive(Clone, Debug)]
pub struct VersionReport {
    pub version: Version,
    pub applied: u64,
    pub epoch: u64,
    pub state_slot: u8,
    /// How many blocks were read and compared, images' blocks too.
    pub blocks: u64,
    /// Bytes that differ from the written ones. In the older version this is no damage, once a step after the
    /// newest has begun to overwrite it.
    pub damaged: Vec<String>,
}

impl Report {
    /// Returns true if a server goes on from here as it is.
    pub fn is_whole(&self) -> bool {
        let newest = self.versions.last().is_none_or(|newest| newest.damaged.is_empty());
        // A folder without any record was never loaded, unless it once had some.
        newest && self.damage.is_empty() && (!self.versions.is_empty() || self.is_blank())
    }

    /// Returns true if nothing was ever loaded.
    pub fn is_blank(&self) -> bool {
        self.versions.is_empty() && self.broken_records.is_empty()
    }

    /// The newest version that is whole.
    pub fn recoverable(&self) -> Option<Version> {
        let whole = self.versions.iter().rev().find(|version| version.damaged.is_empty());
        whole.filter(|_| self.damage.is_empty()).map(|version| version.version)
    }
}
