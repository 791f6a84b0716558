//! Checkpoints: one version of a job on disk, written while training goes on, and restored onto any servers. The
//! server's checkpoint calls run this on blocking threads.
//!
//! Each server writes one part, a safetensors file that any tool can open, into `<dir>/<job>/<name>/`. When all parts
//! are there, [`Store::seal`] writes the manifest beside them; without it there is no checkpoint. Every file is renamed
//! to its name after a flush, so a crash at any instant leaves the whole file or none.
//!
//! Every server writes the same manifest, in one shared folder or beside its own part. The same servers restore from
//! folders of their own. For other servers the parts must be brought together.
//!
//! The manifest has a BLAKE3 of itself, and for each part digests of header and tail. The tail has a BLAKE3 for each
//! block of each tensor, so a server that needs a few blocks of a part verifies exactly those.

mod evicted;
mod fault;
mod files;
mod list;
mod manifest;
mod part;
mod plan;
mod read;
mod ready;
mod removal;
mod restore;
mod seal;
mod write;
mod writers;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use longshore_proto::{Fault, JobName};

use self::writers::Writers;

pub use list::Listed;
pub use manifest::{FORMAT_VERSION, Manifest};
pub use part::{Part, PartShard};
pub use restore::RestoreInfo;
pub use seal::Sealed;

/// A server's checkpoint folder. Making one touches nothing on disk; every method blocks.
#[derive(Clone, Debug)]
pub struct Store {
    dir: PathBuf,
    writers: Arc<Writers>,
}

impl Store {
    pub fn new(dir: impl Into<PathBuf>) -> Store {
        Store { dir: dir.into(), writers: Arc::default() }
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
