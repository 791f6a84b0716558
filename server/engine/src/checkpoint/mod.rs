//! Checkpoints: one version of a job on disk, written while training goes on and restored onto any servers.
//!
//! Each server writes one part, a safetensors file that any tool can open, into `<dir>/<job>/<name>/`. When all parts
//! are there, the manifest is written beside them ([`Store::seal`]); without it there is no checkpoint. Every name
//! appears by a rename after its bytes are flushed, so that a crash at any instant leaves either the whole file or
//! none.
//!
//! With one folder shared by all servers each of them writes the same manifest. With a folder for each host every
//! server writes it beside its own part: the same servers restore from that, and for others the parts must be brought
//! together.
//!
//! The manifest protects itself with a BLAKE3. It has one digest of each part's header and one of its tail, and the
//! tail has one BLAKE3 for each block of each tensor. So a server that needs a few blocks of a part verifies exactly
//! those.

mod again;
mod evicted;
mod fault;
mod files;
mod hold;
mod leftovers;
mod list;
mod manifest;
mod part;
mod plan;
mod prune;
mod read;
mod ready;
mod restore;
mod seal;
#[cfg(test)]
mod tests;
mod whole;
mod write;

use std::path::{Path, PathBuf};

use longshore_proto::{Fault, JobName};

pub use list::Listed;
pub use manifest::{FORMAT_VERSION, Manifest};
pub use part::{Part, PartShard};
pub use restore::RestoreInfo;
pub use seal::Sealed;

/// A server's checkpoint folder. Making one touches nothing on disk; every method blocks.
#[derive(Clone, Debug)]
pub struct Store {
    dir: PathBuf,
}

impl Store {
    pub fn new(dir: impl Into<PathBuf>) -> Store {
        Store { dir: dir.into() }
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The folder of a checkpoint. Names are validated before they become paths, so none leads out of the store.
    fn folder(&self, job: &JobName, name: &str) -> Result<PathBuf, Fault> {
        let name = JobName::parse("name", name)?;
        Ok(self.dir.join(job.as_str()).join(name.as_str()))
    }
}
