//! Performs a job's works, one at a time, on the job's compute thread. Works of a small job run at once on the calling
//! thread.

use std::{
    collections::VecDeque,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex, MutexGuard, TryLockError,
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::{Duration, Instant},
};

use longshore_engine::{job::Job, step::Work};
use longshore_proto::{Fault, FaultKind, limits::BLOCK_ELEMENTS};

use super::{counters::Busy, stages::Stages};

use crate::lock::lock;

/// Works of a job with at most this many elements, all in memory, run on the thread that brings them. A block's update
/// takes 60 us. The wake-ups that hand the work over and bring its answer back take about as long.
const SMALL_ELEMENTS: u64 = 2 * BLOCK_ELEMENTS;

/// Time without a task after which the compute thread looks for a silent drive.
const LOOK: Duration = Duration::from_secs(10);

/// Message to the compute thread.
enum Task {
    Perform(Work),
    /// Counts chunks that have reached the drives.
    Collect,
}

/// Sender of tasks to a compute thread. The thread ends with the sender.
pub(super) struct Computing {
    tasks: Arc<mpsc::Sender<Task>>,
    turn: Arc<Turn>,
    is_small: bool,
}

/// The right to perform a job's works.
struct Turn {
    job: Arc<Job>,
    busy: Arc<Busy>,
    stages: Arc<Stages>,
    /// Works that were accepted and are not performed yet. Locked while a work runs.
    works: Mutex<VecDeque<Work>>,
}

impl Computing {
    pub(super) fn start(job: &Arc<Job>, busy: &Arc<Busy>, stages: &Arc<Stages>) -> Result<Computing, Fault> {
        let (tasks, inbox) = mpsc::channel();
        let tasks = Arc::new(tasks);
        // The callback holds a weak sender: the compute thread owns the job and must end with the handle's sender.
        let collect = Arc::downgrade(&tasks);
        job.gradients.on_arrival(Box::new(move || {
            let _ = collect.upgrade().map(|tasks| tasks.send(Task::Collect));
        }));
        let works = Mutex::default();
        let turn =
            Arc::new(Turn { job: job.clone(), busy: Arc::clone(busy), stages: Arc::clone(stages), works });
        let elements: u64 = job.opened().into_iter().map(|shard| job.layout().shard_len(shard)).sum();
        let is_small = elements <= SMALL_ELEMENTS && job.spill().is_none();
        let name = format!("job-{}", job.spec().name.as_str());
        let thread = Arc::clone(&turn);
        let run = move || fail_if_panics(&thread.job, || thread.serve(&inbox));
        thread::Builder::new().name(name).spawn(run).map_err(|error| {
            Fault::new(FaultKind::Exhausted, "thread", error, "started", "raise the process limit")
        })?;
        Ok(Computing { tasks, turn, is_small })
    }

    /// Performs a small job's work here if no other work waits or runs, else on the compute thread. A send fails only
    /// after the job has failed, and every later call reports that failure.
    pub(super) fn perform(&self, work: Work) {
        // While a snapshot copies, an update waits for the copies. This thread must not wait, so the compute thread
        // takes the work.
        if self.is_small
            && self.turn.busy.queued() == 0
            && self.turn.job.snapshots.len() == 0
            && let Some(mut works) = self.turn.try_lock()
        {
            works.push_back(work);
            fail_if_panics(&self.turn.job, || self.turn.perform_all(&mut works, || None));
            return;
        }
        self.turn.busy.handed();
        let _ = self.tasks.send(Task::Perform(work));
    }
}

impl Turn {
    /// Body of the compute thread. The thread ends with the job's last user, or with its first failure.
    fn serve(&self, inbox: &mpsc::Receiver<Task>) -> Result<(), Fault> {
        self.job.compute().pool().adopt_caller();
        loop {
            let task = match inbox.recv_timeout(LOOK) {
                Ok(task) => task,
                Err(RecvTimeoutError::Timeout) => {
                    self.job.check_drives(Instant::now())?;
                    continue;
                }
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
            };
            let mut works = lock(&self.works);
            let mut first = Some(task);
            self.perform_all(&mut works, || first.take().or_else(|| inbox.try_recv().ok()))?;
        }
    }

    /// Performs works in order of arrival until there are none. Follow-up work queues behind waiting work, so a delayed
    /// job's next sums run between this step's updates.
    fn perform_all(
        &self,
        works: &mut VecDeque<Work>,
        mut next_task: impl FnMut() -> Option<Task>,
    ) -> Result<(), Fault> {
        loop {
            while let Some(task) = next_task() {
                works.extend(match task {
                    Task::Perform(work) => {
                        self.busy.taken();
                        Some(work)
                    }
                    Task::Collect => self.job.collect()?,
                });
            }
            self.busy.has(works.len());
            let Some(next) = works.front().cloned() else { return Ok(()) };
            self.busy.count(&next, || self.job.perform(works))?;
            if let Work::Update { step, .. } = next {
                self.stages.updated(step, Instant::now());
            }
        }
    }

    fn try_lock(&self) -> Option<MutexGuard<'_, VecDeque<Work>>> {
        match self.works.try_lock() {
            Ok(works) => Some(works),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

/// Runs works. A panic becomes the job's failure, which ends all waits for the works.
fn fail_if_panics(job: &Job, body: impl FnOnce() -> Result<(), Fault>) {
    let ended = catch_unwind(AssertUnwindSafe(body));
    if let Err(panic) = ended {
        let said =
            panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
        let value = format!("panicked ({})", said.unwrap_or("without a message"));
        let remedy = "report this as a defect of Longshore, with the server's log; then restart the server, or restore a checkpoint";
        job.protocol.fail(Fault::new(FaultKind::Internal, "job.compute", value, "running", remedy));
    }
}

#[cfg(test)]
mod tests {
    use longshore_proto::Incarnation;

    use crate::jobs::tests::{jobs, wanted};

    #[tokio::test]
    async fn a_compute_thread_that_panics_fails_its_job() {
        let (_, handle) = jobs().open(wanted("run", None), false, Incarnation::default()).await.unwrap();
        super::fail_if_panics(&handle.job, || panic!("in block 3"));
        let fault = handle.job.protocol.check_alive().unwrap_err();
        assert!(fault.field == "job.compute" && fault.value.contains("in block 3"), "{fault}");
    }
}
