//! How jobs end here: deleted, opened anew at the version before, or left with the server.

use std::{
    sync::{Arc, PoisonError, TryLockError, atomic::Ordering},
    time::Duration,
};

use longshore_engine::tier::{Storage, StoredJob, delete_stored};
use longshore_proto::{Fault, FaultKind, Incarnation, JobName, Version};
use tokio::{
    runtime::Handle,
    sync::watch,
    time::{sleep, timeout},
};

use super::{
    JobHandle, Jobs,
    away::{Away, Kept},
    directories, not_found, recovering, unreadable,
};

/// The longest wait for the users of a job that is opened anew. A chunk on its way may be silent for 10 s, and an
/// update runs to its end.
const LET_GO: Duration = Duration::from_secs(60);

/// How often the end of a server looks whether a job is still being opened.
const OPENING: Duration = Duration::from_millis(10);

impl Jobs {
    /// Opens no job from now on.
    pub(crate) fn open_no_more(&self) {
        self.is_ending.store(true, Ordering::Relaxed);
    }

    /// Ends once nobody uses any job any more. By then the caller has ended all calls, and has said that no more jobs are opened.
    pub(crate) async fn ended(jobs: Arc<Jobs>) {
        // One that is just being opened is not listed before it is open.
        while jobs.opening.try_lock().is_err_and(|error| matches!(error, TryLockError::WouldBlock)) {
            sleep(OPENING).await;
        }
        let changes: Vec<_> = jobs.all().iter().map(|handle| handle.changes()).collect();
        drop(jobs);
        for changes in changes {
            gone(changes).await;
        }
    }

    /// Forgets a job and removes what its tier keeps of it. A job that is kept here and cannot be read is removed
    /// only where the caller says so, since a drive that is missing now may come back.
    pub(crate) fn delete(&self, name: &str, discard_unreadable: bool) -> Result<(), Fault> {
        let handle = match self.get(name) {
            Ok(handle) => handle,
            Err(fault) => return self.delete_away(&JobName::parse("job", name)?, fault, discard_unreadable),
        };
        let stored = handle.stored();
        self.lock().remove(&stored.spec.name);
        handle.close(not_found(name));
        handle.job.discard().inspect_err(|fault| {
            // What is left can be deleted by another call. Another job may have the name by now.
            let kept = Kept::new(stored.clone(), &self.storage);
            let away = Away::entry(fault.clone(), Some(kept));
            self.lock().entry(stored.spec.name).or_insert(away);
        })
    }

    /// `fault` says why the job is not open.
    fn delete_away(&self, name: &JobName, fault: Fault, discard_unreadable: bool) -> Result<(), Fault> {
        if !self.lock().contains_key(name) || fault.kind == FaultKind::Unavailable {
            return Err(fault);
        }
        if !discard_unreadable {
            return Err(unreadable(name, &fault));
        }
        let _opening = self.opening.lock().unwrap_or_else(PoisonError::into_inner);
        if let Ok(handle) = self.get(name.as_str()) {
            // It was opened meanwhile, so it is readable after all.
            drop(handle);
            return self.delete(name.as_str(), false);
        }
        delete_stored(&directories(&self.storage), name)?;
        self.lock().remove(name);
        Ok(())
    }

    /// Opens a job anew at the version before its newest. Blocks until its users have let go of it and its state is read.
    pub(crate) fn step_back(
        &self,
        name: &str,
        incarnation: Incarnation,
        version: Version,
    ) -> Result<Arc<JobHandle>, Fault> {
        let _opening = self.opening.lock().unwrap_or_else(PoisonError::into_inner);
        let stored = match self.get(name) {
            Ok(handle) if handle.job.check_step_back(incarnation, version)? => return Ok(handle),
            Ok(handle) => self.put_away(handle),
            Err(fault) => self.stored(name).ok_or(fault)?,
        };
        tracing::warn!(job = name, %version, "stepping back to the version before");
        let storage = Storage { at_most: Some(version), ..self.storage.clone() };
        let handle = self.start(stored, &storage)?;
        let found = handle.job.progress().version;
        if found != version {
            let remedy = "step every server back to the same version, or restore a checkpoint";
            return Err(Fault::new(
                FaultKind::Precondition,
                "version",
                version.0,
                format!("{found}, the newest left"),
                remedy,
            ));
        }
        Ok(handle)
    }

    /// Ends the service of a job, so that it can be opened again.
    fn put_away(&self, handle: Arc<JobHandle>) -> StoredJob {
        let stored = handle.stored();
        let name = stored.spec.name.clone();
        let kept = Kept { stored: stored.clone(), drives: handle.job.disk_bytes() };
        self.lock().insert(name.clone(), Away::entry(recovering(&name), Some(kept)));
        handle.close(recovering(&name));
        let_go(handle);
        stored
    }
}

/// Waits for the other users of a job that was closed. If they do not let go, the folders' lock makes the next open fail
/// and say so.
fn let_go(handle: Arc<JobHandle>) {
    let changes = handle.changes();
    drop(handle);
    let _ = Handle::current().block_on(timeout(LET_GO, gone(changes)));
}

/// Ends when the job is dropped, since the sender of its changes goes with it.
async fn gone(mut changes: watch::Receiver<u64>) {
    while changes.changed().await.is_ok() {}
}
