//! Parts that this process writes or has written, and who asked for each. Two authors may ask for one name: one
//! writes at a time, and a part stays until the last of its authors gives it up.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::{Condvar, Mutex},
    time::Instant,
};

use longshore_proto::{Fault, FaultKind};

use super::fault::FIELD;
use crate::lock;

#[derive(Debug, Default)]
pub(super) struct Writers {
    parts: Mutex<BTreeMap<PathBuf, Part>>,
    written: Condvar,
}

#[derive(Debug, Default)]
struct Part {
    is_being_written: bool,
    authors: BTreeSet<u64>,
}

/// The turn to write a part.
pub(super) struct Turn<'a> {
    writers: &'a Writers,
    part: PathBuf,
}

impl Writers {
    /// Waits until no other call writes this part, and notes its author.
    pub(super) fn enter(&self, part: &Path, author: u64, deadline: Instant) -> Result<Turn<'_>, Fault> {
        let mut parts = lock(&self.parts);
        loop {
            let found = parts.entry(part.to_path_buf()).or_default();
            found.authors.insert(author);
            if !std::mem::replace(&mut found.is_being_written, true) {
                return Ok(Turn { writers: self, part: part.to_path_buf() });
            }
            let wait = deadline.saturating_duration_since(Instant::now());
            if wait.is_zero() {
                found.authors.remove(&author);
                let value = format!("{}, being written for another caller", part.display());
                let remedy = "try again later, or choose another name";
                return Err(Fault::new(FaultKind::Deadline, FIELD, value, "written in time", remedy));
            }
            parts = self
                .written
                .wait_timeout(parts, wait)
                .map_or_else(|error| error.into_inner().0, |woken| woken.0);
        }
    }

    /// Notes that an author gives a part up. Returns true if no other author needs it.
    pub(super) fn leave(&self, part: &Path, author: u64) -> bool {
        let mut parts = lock(&self.parts);
        let Some(found) = parts.get_mut(part) else { return true };
        found.authors.remove(&author);
        if found.is_being_written || !found.authors.is_empty() {
            return false;
        }
        parts.remove(part);
        true
    }

    /// Forgets the parts of a sealed checkpoint.
    pub(super) fn sealed(&self, folder: &Path) {
        lock(&self.parts).retain(|part, found| found.is_being_written || part.parent() != Some(folder));
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut parts = lock(&self.writers.parts);
        if let Some(found) = parts.get_mut(&self.part) {
            found.is_being_written = false;
        }
        self.writers.written.notify_all();
    }
}
