//! The notes beside the checkpoints that say which jobs are evicted. Their folder may be a network's, where a call hangs for as
//! long as its file server is gone: so one thread goes there, and whoever asks waits for it with a deadline.

use std::{
    io,
    sync::{
        Arc,
        mpsc::{self, RecvTimeoutError, SyncSender, TrySendError},
    },
    thread,
    time::Duration,
};

use longshore_engine::checkpoint::{Evicted, Store};
use longshore_proto::{Fault, FaultKind, JobName, Version};

/// A file server that restarts is silent for some seconds, and those who open a job wait for 60.
const PATIENCE: Duration = Duration::from_secs(10);
/// How many may wait for the thread. A note takes milliseconds.
const WAITING: usize = 64;

type Task = Box<dyn FnOnce(&Store) + Send>;

pub(crate) struct Notes(SyncSender<Task>);

impl Notes {
    /// # Errors
    /// Where the thread cannot be started. It ends with the last user of this, and is left behind if it hangs.
    pub(crate) fn new(store: Arc<Store>) -> io::Result<Notes> {
        let (tasks, inbox) = mpsc::sync_channel::<Task>(WAITING);
        let all = move || inbox.into_iter().for_each(|task| task(&store));
        thread::Builder::new().name("notes".into()).spawn(all)?;
        Ok(Notes(tasks))
    }

    /// Where the job's state is, if there is a note of it and the checkpoint is still there.
    pub(super) fn of(&self, job: &JobName) -> Result<Option<Evicted>, Fault> {
        let job = job.clone();
        self.ask(move |store| store.evicted_job(&job))?
    }

    pub(super) fn write(&self, job: &JobName, checkpoint: &str, version: Version) -> Result<(), Fault> {
        let (job, checkpoint) = (job.clone(), checkpoint.to_string());
        self.ask(move |store| store.note_evicted(&job, &checkpoint, version))?
    }

    /// Removes a note that nobody waits for.
    pub(super) fn remove_later(&self, job: &JobName) {
        let job = job.clone();
        let task = move |store: &Store| {
            if let Err(fault) = store.forget_evicted(&job) {
                tracing::warn!(%job, %fault, "the note of an eviction is left");
            }
        };
        if self.0.try_send(Box::new(task)).is_err() {
            tracing::warn!(
                "the note of an eviction may be left: too many calls wait for the checkpoint folder"
            );
        }
    }

    /// A note that could not be removed in time is removed once the folder answers.
    pub(super) fn remove(&self, job: &JobName) -> Result<(), Fault> {
        let job = job.clone();
        self.ask(move |store| store.forget_evicted(&job))?
    }

    /// Tasks run in the order in which they are asked for, so that what is removed last stays removed.
    fn ask<T: Send + 'static>(&self, task: impl FnOnce(&Store) -> T + Send + 'static) -> Result<T, Fault> {
        let (answer, answered) = mpsc::sync_channel(1);
        let task = move |store: &Store| {
            // Whoever asked may be gone.
            let _ = answer.send(task(store));
        };
        self.0.try_send(Box::new(task)).map_err(|refused| match refused {
            TrySendError::Full(_) => unanswered(format!("{WAITING} calls wait for it")),
            TrySendError::Disconnected(_) => ended(),
        })?;
        answered.recv_timeout(PATIENCE).map_err(|error| match error {
            RecvTimeoutError::Timeout => {
                unanswered(format!("without an answer for {} s", PATIENCE.as_secs()))
            }
            RecvTimeoutError::Disconnected => ended(),
        })
    }
}

fn unanswered(value: String) -> Fault {
    let remedy = "see whether the folder of --checkpoint-dir is mounted and its file server answers; the call is repeated";
    Fault::new(FaultKind::Unavailable, "checkpoint_dir", value, "a folder that answers", remedy)
}

fn ended() -> Fault {
    let remedy = "restart the server; its log has the reason, which is a defect of Longshore";
    Fault::new(
        FaultKind::Internal,
        "checkpoint_dir",
        "the thread that reads it has ended",
        "a running one",
        remedy,
    )
}
