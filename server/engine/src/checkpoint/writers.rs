//! Parts that this process writes or has written, and their authors: the callers that asked for them. Two authors of
//! one name write in turn, and get the same part. A part stays until its last author gives it up.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::{Arc, Condvar, Mutex, Weak},
    time::Instant,
};

use longshore_proto::{Fault, FaultKind, Version};

use super::{fault::FIELD, part::Part};
use crate::{job::Job, lock};

#[derive(Default)]
pub(super) struct Writers {
    parts: Mutex<BTreeMap<PathBuf, State>>,
    written: Condvar,
}

impl std::fmt::Debug for Writers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(lock(&self.parts).keys()).finish()
    }
}

#[derive(Default)]
struct State {
    is_being_written: bool,
    authors: BTreeSet<u64>,
    /// The last written part, and its job.
    last: Option<(Part, Weak<Job>)>,
}

pub(super) struct Turn<'a> {
    writers: &'a Writers,
    path: PathBuf,
    author: u64,
    ended: bool,
}

impl Writers {
    /// Waits until no other call writes this part, and adds its author.
    pub(super) fn enter(&self, path: &Path, author: u64, deadline: Instant) -> Result<Turn<'_>, Fault> {
        let mut parts = lock(&self.parts);
        let mut added = false;
        loop {
            let state = parts.entry(path.to_path_buf()).or_default();
            added |= state.authors.insert(author);
            if !std::mem::replace(&mut state.is_being_written, true) {
                return Ok(Turn { writers: self, path: path.to_path_buf(), author, ended: false });
            }
            let wait = deadline.saturating_duration_since(Instant::now());
            if wait.is_zero() {
                // Another call of this author may be the one that writes.
                if added {
                    state.authors.remove(&author);
                }
                let value = format!("{}, being written for another caller", path.display());
                let remedy = "try again later, or choose another name";
                return Err(Fault::new(FaultKind::Deadline, FIELD, value, "written in time", remedy));
            }
            parts = self
                .written
                .wait_timeout(parts, wait)
                .map_or_else(|error| error.into_inner().0, |woken| woken.0);
        }
    }

    /// Removes an author of a part. Returns true if no author is left.
    pub(super) fn leave(&self, path: &Path, author: u64) -> bool {
        let mut parts = lock(&self.parts);
        let Some(state) = parts.get_mut(path) else { return true };
        state.authors.remove(&author);
        if state.is_being_written || !state.authors.is_empty() {
            return false;
        }
        parts.remove(path);
        true
    }

    pub(super) fn sealed(&self, folder: &Path) {
        lock(&self.parts).retain(|path, state| state.is_being_written || path.parent() != Some(folder));
    }
}

impl Turn<'_> {
    /// Returns the part that is written already, if it is of the wanted version.
    ///
    /// # Errors
    /// `Conflict` if another author may seal a part of another version.
    pub(super) fn found(
        &self,
        job: &Arc<Job>,
        name: &str,
        expected: Option<Version>,
    ) -> Result<Option<Part>, Fault> {
        let mut parts = lock(&self.writers.parts);
        let Some(state) = parts.get_mut(&self.path) else { return Ok(None) };
        let is_of_job = |of: &Weak<Job>| std::ptr::eq(of.as_ptr(), Arc::as_ptr(job));
        let Some((part, _)) = state.last.as_ref().filter(|(_, of)| is_of_job(of) && self.path.exists())
        else {
            return Ok(None);
        };
        if part.version == expected.unwrap_or_else(|| job.progress().version) {
            return Ok(Some(part.clone()));
        }
        if state.authors.iter().all(|author| *author == self.author) {
            return Ok(None);
        }
        state.authors.remove(&self.author);
        let value = format!("{name}, of {}", part.version);
        let remedy = "choose another name: another caller makes this checkpoint";
        Err(Fault::new(FaultKind::Conflict, "name", value, "not another caller's", remedy))
    }

    pub(super) fn written(&self, part: &Part, job: &Arc<Job>) {
        if let Some(state) = lock(&self.writers.parts).get_mut(&self.path) {
            state.last = Some((part.clone(), Arc::downgrade(job)));
        }
    }

    /// Ends the turn. Returns false, and the turn goes on, if every author gave the part up during the turn. Nobody
    /// else removes the part then.
    pub(super) fn end(&mut self) -> bool {
        let mut parts = lock(&self.writers.parts);
        if parts.get(&self.path).is_some_and(|state| state.authors.is_empty()) {
            return false;
        }
        self.end_in(&mut parts);
        self.ended = true;
        true
    }

    fn end_in(&self, parts: &mut BTreeMap<PathBuf, State>) {
        if let Some(state) = parts.get_mut(&self.path) {
            state.is_being_written = false;
            if state.last.is_none() {
                // The call has failed, or found the checkpoint sealed, so its author has no part to give up.
                state.authors.remove(&self.author);
            }
            if state.authors.is_empty() {
                parts.remove(&self.path);
            }
        }
        self.writers.written.notify_all();
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if !self.ended {
            self.end_in(&mut lock(&self.writers.parts));
        }
    }
}
