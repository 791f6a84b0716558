//! Ends of a job on this server: deletion, step back to the version before, or shutdown.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use longshore_engine::tier::{Storage, StoredJob, delete_stored, give_up_missing};
use longshore_proto::{Fault, FaultKind, Incarnation, JobName, Rank, Version};
use tokio::{
    sync::watch,
    time::{sleep, timeout},
};

use super::{Away, JobEntry, JobHandle, Jobs, Kept, deleted, not_found, recovering, turns::Turn, unreadable};
use crate::{
    lock::lock,
    tasks::{blocking, finished},
};

/// Longest wait for the users of a job that steps back. A chunk in flight may be silent for 10 s, and an update runs to
/// its end.
const LET_GO: Duration = Duration::from_secs(60);

/// Interval at which a shutdown checks whether a job is still being opened.
const OPENING: Duration = Duration::from_millis(10);

/// A caller's wish to take the newest decision back.
pub(crate) struct StepBack {
    /// Incarnation of the calling rank 0, which fences its earlier processes.
    pub(crate) incarnation: Incarnation,
    /// The version before the newest.
    pub(crate) version: Version,
    /// The rank 0 whose decision is taken back; 0 is not compared.
    pub(crate) decided_by: Incarnation,
}

impl Jobs {
    /// Refuses every later open.
    pub(crate) fn open_no_more(&self) {
        self.is_ending.store(true, Ordering::Relaxed);
    }

    /// Returns once no job has users. The caller has ended all calls and has called `open_no_more`.
    pub(crate) async fn ended(jobs: Arc<Jobs>) {
        // A job that is being opened is not listed yet, but has a turn.
        while jobs.turns.any() {
            sleep(OPENING).await;
        }
        let changes: Vec<_> = jobs.all().iter().map(|handle| handle.changes()).collect();
        drop(jobs);
        for changes in changes {
            gone(changes).await;
        }
    }

    /// Closes a job and deletes its stored state. An unreadable job is deleted only with `discard_unreadable`, since a
    /// missing drive may come back.
    pub(crate) async fn delete(self: Arc<Self>, name: &str, discard_unreadable: bool) -> Result<(), Fault> {
        let name = JobName::parse("job", name)?;
        let had_moved = lock(&self.gone).get_mut(&name).and_then(Option::take).is_some();
        match self.get(name.as_str()) {
            Ok(handle) => return blocking(move || self.delete_open(&handle)).await,
            Err(fault) if had_moved && fault.kind == FaultKind::NotFound => return Ok(()),
            Err(fault) if fault.kind == FaultKind::Unavailable => return Err(fault),
            Err(_) => {}
        }
        let turn = self.turns.take(&name).await?;
        // The job may have been opened since the first look, and then is readable after all.
        blocking(move || match self.get(name.as_str()) {
            Ok(handle) => self.delete_open(&handle),
            Err(fault) => self.delete_away(&name, fault, discard_unreadable, &turn),
        })
        .await
    }

    pub(super) fn delete_open(&self, handle: &Arc<JobHandle>) -> Result<(), Fault> {
        let stored = handle.stored();
        // Another call may have deleted or reopened this job since, and opened a later one of the name.
        let name = &stored.spec.name;
        self.note_gone(name, None);
        if !self.take_out(handle) {
            return Err(self.get(name.as_str()).err().unwrap_or_else(|| not_found(name.as_str())));
        }
        handle.close(deleted(name));
        handle.job.discard().inspect_err(|fault| {
            // A failed deletion leaves an away entry, so that another call can retry. The name may belong to another
            // job by now.
            let kept = Kept::new(stored.clone(), &self.storage);
            let away = Away::entry(fault.clone(), Some(kept));
            lock(&self.jobs).entry(stored.spec.name).or_insert(away);
        })
    }

    /// Removes the entry of this very job. Returns false if the name has another entry, or none.
    fn take_out(&self, handle: &Arc<JobHandle>) -> bool {
        let (mut jobs, name) = (lock(&self.jobs), &handle.job.spec().name);
        let is_same = |entry: &JobEntry| matches!(entry, JobEntry::Open(open) if Arc::ptr_eq(open, handle));
        jobs.get(name).is_some_and(is_same) && jobs.remove(name).is_some()
    }

    /// Deletes a job that is not open. `fault` says why it is not open.
    fn delete_away(
        &self,
        name: &JobName,
        fault: Fault,
        discard_unreadable: bool,
        _: &Turn,
    ) -> Result<(), Fault> {
        if !lock(&self.jobs).contains_key(name) {
            let is_given_up = discard_unreadable && give_up_missing(&self.storage.folders(), name);
            return if is_given_up { Ok(()) } else { Err(fault) };
        }
        if fault.kind == FaultKind::Unavailable {
            return Err(fault);
        }
        if !discard_unreadable {
            return Err(unreadable(name, &fault));
        }
        delete_stored(&self.storage.folders(), name)?;
        lock(&self.jobs).remove(name);
        Ok(())
    }

    /// Reopens a job at the version before its newest. Waits until its users drop it and its state is read. If the
    /// caller has left before its turn, nothing happens.
    pub(crate) async fn step_back(
        self: Arc<Self>,
        name: &str,
        to: StepBack,
    ) -> Result<Arc<JobHandle>, Fault> {
        let name = JobName::parse("job", name)?;
        let turn = self.turns.take(&name).await?;
        // The act continues even if the caller is gone: a job that was put away must come back.
        let act = async move {
            let StepBack { incarnation, version, decided_by } = to;
            let stored = match self.get(name.as_str()) {
                Ok(handle) => {
                    check_not_led(&handle, incarnation)?;
                    let ended = recovering(&name);
                    let there =
                        handle.job.protocol.end_for_step_back(incarnation, version, decided_by, &ended)?;
                    let job = Arc::clone(&handle.job);
                    let kept = blocking(move || job.protocol.keep_joined()).await;
                    if there {
                        return kept.map(|()| handle);
                    }
                    // A failed drive is reported when the job is opened again.
                    self.put_away(handle).await
                }
                Err(fault) => self.stored(name.as_str()).ok_or(fault)?,
            };
            tracing::warn!(job = %name, %version, "stepping back to the version before");
            blocking(move || self.reopen(stored, version, &turn)).await
        };
        finished(tokio::spawn(act)).await
    }

    /// Opens the job again at `version`. Blocks while the state is read.
    fn reopen(&self, stored: StoredJob, version: Version, _: &Turn) -> Result<Arc<JobHandle>, Fault> {
        let storage = Storage { at_most: Some(version), ..self.storage.clone() };
        let handle = self.start(stored.clone(), &storage).inspect_err(|_| {
            // The version before is not whole, so the job is opened at its newest version again.
            if let Err(fault) = self.start(stored, &self.storage) {
                tracing::error!(%fault, "not opened again");
            }
        })?;
        let found = handle.job.progress().version;
        if found != version {
            let limit = format!("{found}, the newest left");
            let remedy = "start rank 0, which brings the servers to one version; where it cannot, restore a checkpoint";
            return Err(Fault::new(FaultKind::Precondition, "version", version.0, limit, remedy));
        }
        Ok(handle)
    }

    /// Closes a job for reopening and returns its stored form.
    async fn put_away(&self, handle: Arc<JobHandle>) -> StoredJob {
        let stored = handle.stored();
        let name = stored.spec.name.clone();
        let kept = Kept { stored: stored.clone(), drives: handle.job.disk_bytes() };
        lock(&self.jobs).insert(name.clone(), Away::entry(recovering(&name), Some(kept)));
        handle.close(recovering(&name));
        let changes = handle.changes();
        drop(handle);
        // If other users of the job do not drop it, the folders' lock refuses the next open.
        let _ = timeout(LET_GO, gone(changes)).await;
        stored
    }
}

/// Refuses a step back by a caller that has not fenced the present rank 0, while that rank trains. Its next commit
/// would follow a step that other servers took back.
fn check_not_led(handle: &JobHandle, incarnation: Incarnation) -> Result<(), Fault> {
    let current = handle.job.protocol.ranks().first().and_then(|rank| rank.incarnation);
    match current.filter(|&current| current < incarnation && handle.processes.is_watching(Rank(0), current)) {
        None => Ok(()),
        Some(_) => {
            let remedy = "stop the job's ranks first; a new rank 0 steps back by itself where that is needed";
            Err(Fault::new(FaultKind::Precondition, "job.phase", "being trained", "without a rank 0", remedy))
        }
    }
}

/// Returns when the job is dropped, which drops the sender of `changes`.
async fn gone(mut changes: watch::Receiver<u64>) {
    while changes.changed().await.is_ok() {}
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use futures_util::FutureExt;
    use longshore_proto::{Incarnation, JobName, Version};

    use super::StepBack;
    use crate::jobs::tests::{jobs, wanted};

    #[tokio::test]
    async fn a_step_back_whose_caller_is_gone_at_its_turn_does_nothing() {
        let jobs = jobs();
        let (_, handle) =
            Arc::clone(&jobs).open(wanted("run", None), false, Incarnation::default()).await.unwrap();
        let name = JobName::parse("job", "run").unwrap();
        let step_back = || {
            let to =
                StepBack { incarnation: Incarnation(7), version: Version(0), decided_by: Incarnation(0) };
            Arc::clone(&jobs).step_back("run", to)
        };
        let fenced_by = || handle.job.protocol.ranks()[0].incarnation;
        let turn = jobs.turns.take(&name).await.unwrap();
        assert!(step_back().now_or_never().is_none());
        drop(turn);
        jobs.turns.take(&name).await.unwrap();
        assert_eq!(fenced_by(), None);
        step_back().await.unwrap();
        assert_eq!(fenced_by(), Some(Incarnation(7)));
    }

    #[tokio::test]
    async fn a_late_deletion_leaves_a_later_job_of_the_name() {
        let jobs = jobs();
        let (_, first) =
            Arc::clone(&jobs).open(wanted("run", None), false, Incarnation::default()).await.unwrap();
        Arc::clone(&jobs).delete("run", false).await.unwrap();
        Arc::clone(&jobs).open(wanted("run", None), false, Incarnation::default()).await.unwrap();
        assert!(
            jobs.delete_open(&first).is_err(),
            "a call that had found the first job deletes nothing more"
        );
        assert!(jobs.get("run").is_ok());
    }
}
