//! Checkpoints: one version of a job on disk, written while training goes on, restored onto any servers.
//!
//! Each server writes one part, a safetensors file any tool can open, into `<dir>/<job>/<name>/`. When all parts are
//! there, the manifest is written beside them ([`Store::seal`]); a checkpoint without one does not exist. Every name
//! appears by a rename after its bytes are flushed, so a crash at any instant leaves either the whole file or none.
//!
//! With one folder shared by all servers everybody writes the same manifest. With a folder for each host every server
//! writes it beside its own part: the same servers restore from that, and for others the parts must be brought together.
//!
//! What protects a byte: the manifest its own BLAKE3; the part's header and tail one digest each, in the manifest; all
//! tensors one BLAKE3 a block, in the tail. So a server that needs a few blocks of a part verifies exactly those.

mod again;
pub(crate) mod exact;
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

/// A server's checkpoint folder. Nothing is touched until a method is called; every method blocks.
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

    /// Names are validated before they become paths, so none leads out of the store.
    fn folder(&self, job: &JobName, name: &str) -> Result<PathBuf, Fault> {
        let name = JobName::parse("name", name)?;
        Ok(self.dir.join(job.as_str()).join(name.as_str()))
    }
}
