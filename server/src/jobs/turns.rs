//! Turns of calls that open, reopen or delete one job, or use its checkpoints. Calls on other jobs do not wait, and
//! waiting takes no thread.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, Weak},
    time::Duration,
};

use longshore_proto::{Fault, FaultKind, JobName, limits::DEFAULT_DEADLINE_MS};
use tokio::{
    sync::{Mutex as Waiting, OwnedMutexGuard},
    time::timeout,
};

use crate::lock::lock;

/// A call's turn on a job, which ends when it is dropped.
pub(crate) type Turn = OwnedMutexGuard<()>;

/// Locks of the jobs on which a call has its turn, or waits for it.
#[derive(Default)]
pub(crate) struct Turns(Mutex<BTreeMap<JobName, Weak<Waiting<()>>>>);

impl Turns {
    /// Takes the next turn on a job.
    ///
    /// # Errors
    /// `Unavailable` at the deadline: workers repeat the call.
    pub(crate) async fn take(&self, name: &JobName) -> Result<Turn, Fault> {
        let patience = Duration::from_millis(DEFAULT_DEADLINE_MS);
        timeout(patience, self.of(name).lock_owned()).await.map_err(|_| {
            let remedy = "wait: another call opens, steps back or deletes this job, or reads its checkpoints";
            Fault::new(FaultKind::Unavailable, "job", format!("{name}, in use"), "free", remedy)
        })
    }

    /// Takes the next turn. Blocks, so the caller must not run on the network runtime.
    pub(super) fn wait(&self, name: &JobName) -> Turn {
        self.of(name).blocking_lock_owned()
    }

    pub(super) fn any(&self) -> bool {
        lock(&self.0).values().any(|turn| turn.strong_count() > 0)
    }

    fn of(&self, name: &JobName) -> Arc<Waiting<()>> {
        let mut turns = lock(&self.0);
        if let Some(turn) = turns.get(name).and_then(Weak::upgrade) {
            return turn;
        }
        turns.retain(|_, turn| turn.strong_count() > 0);
        let turn = Arc::new(Waiting::new(()));
        turns.insert(name.clone(), Arc::downgrade(&turn));
        turn
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[tokio::test]
    async fn calls_on_one_job_take_turns_and_others_do_not_wait() {
        let turns = Turns::default();
        let [a, b] = ["a", "b"].map(|name| JobName::parse("job", name).unwrap());
        let turn = turns.take(&a).await.unwrap();
        turns.take(&b).await.unwrap();
        assert!(turns.take(&a).now_or_never().is_none() && turns.any());
        drop(turn);
        assert!(!turns.any());
        turns.take(&a).await.unwrap();
        assert_eq!(turns.0.lock().unwrap().len(), 1, "a name stays only while it is used");
    }
}
