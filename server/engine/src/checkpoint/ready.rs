//! Readiness for checkpoints. A server checks at its start and before a job's first step, so that no job trains for
//! hours towards a checkpoint that cannot be written.

use std::{
    fs,
    hash::{BuildHasher, RandomState},
    io::{ErrorKind, Write},
    path::{Path, PathBuf},
};

use longshore_proto::{Fault, FaultKind};
use rustix::fs::statvfs;

use super::{
    Store,
    fault::{FIELD, defect, io},
    files::Draft,
    write::{plan, room},
};
use crate::job::Job;

/// Content of the probe file: one page.
const PROBE_BYTES: [u8; 4096] = [0; 4096];

impl Store {
    /// Creates the folder, but not its parents, and writes and removes a file there. Returns the free bytes.
    pub fn check_folder(&self) -> Result<u64, Fault> {
        match fs::create_dir(self.dir()) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            created => created.map_err(io("create folder", self.dir()))?,
        }
        if !self.dir().is_dir() {
            let remedy = "name a folder with --checkpoint-dir";
            return Err(Fault::new(FaultKind::Precondition, FIELD, self.dir().display(), "a folder", remedy));
        }
        let draft = Draft::create(self.probe(), 0)?;
        let written = (&*draft.file).write_all(&PROBE_BYTES).and_then(|()| draft.file.sync_all());
        written.map_err(io("write", draft.path()))?;
        free(self.dir())
    }

    /// Reserves the room that this server's part of the job takes, and gives it back.
    pub fn check_room(&self, job: &Job) -> Result<(), Fault> {
        self.check_folder()?;
        let target = self.probe();
        let spec = serde_json::to_vec(job.spec()).map_err(|error| defect(&target, error))?;
        let bytes = room(&plan(job, &job.placement().owned(job.server()), &spec), &target)?.bytes;
        let free = free(self.dir())?;
        if free < bytes {
            let value = format!("{} with {free} bytes free", self.dir().display());
            let limit = format!("with room for {bytes} bytes, this server's part of a checkpoint");
            let remedy =
                "free space there, keep fewer checkpoints (--checkpoint-keep), or choose another folder";
            return Err(Fault::new(FaultKind::Exhausted, FIELD, value, limit, remedy));
        }
        Draft::create(target, 0)?.reserve(bytes)
    }

    /// Returns the path of a probe file, in folders of its own that are removed with the file. No job and no other
    /// server has the same names.
    fn probe(&self) -> PathBuf {
        let unique = RandomState::new().hash_one(std::process::id());
        self.dir().join(format!(".probe-{unique:016x}")).join("probe").join("part")
    }
}

fn free(dir: &Path) -> Result<u64, Fault> {
    let found = statvfs(dir).map_err(|error| io("look at", dir)(error.into()))?;
    Ok(found.f_bavail.saturating_mul(found.f_frsize))
}
