//! The jobs of this server: each with its compute thread and a signal that it moved.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc,
    },
    thread,
};

use longshore_engine::{
    admission::Budget,
    job::{Compute, Job},
    step::Work,
    tier::Storage,
};
use longshore_proto::{Fault, FaultKind, JobName, JobSpec, Placement, Rank, ServerId, Step, Version};
use tokio::{
    sync::watch,
    time::{Instant, timeout_at},
};

/// A job and what moves it. Dropped with its last user; the compute thread ends with it.
pub(crate) struct JobHandle {
    pub(crate) job: Arc<Job>,
    works: mpsc::Sender<Work>,
    changed: watch::Receiver<u64>,
    closed: AtomicBool,
    /// Contributions to later steps are refused: a drain has begun.
    last_step: AtomicU64,
    /// How each rank's calls come.
    transports: Mutex<BTreeMap<Rank, &'static str>>,
}

/// All jobs of a server.
pub(crate) struct Jobs {
    jobs: Mutex<BTreeMap<JobName, Arc<JobHandle>>>,
    /// Held while a job is created, so that two opens of one name are not both admitted, while calls to other jobs go
    /// on: touching a large job's memory takes minutes.
    opening: Mutex<()>,
    budget: Budget,
    storage: Storage,
    compute: Arc<Compute>,
}

impl JobHandle {
    fn start(
        spec: JobSpec,
        placement: Placement,
        server: ServerId,
        budget: &Budget,
        storage: &Storage,
        compute: Arc<Compute>,
    ) -> Result<JobHandle, Fault> {
        let (moved, changed) = watch::channel(0u64);
        let observer = Box::new(move || moved.send_modify(|count| *count = count.wrapping_add(1)));
        let job = Arc::new(Job::open(spec, placement, server, budget, storage, compute, observer)?);
        let (works, inbox) = mpsc::channel();
        let worker = Arc::clone(&job);
        let name = format!("job-{}", job.spec().name.as_str());
        let thread = thread::Builder::new().name(name).spawn(move || perform_all(&worker, &inbox));
        thread.map_err(|error| {
            Fault::new(FaultKind::Exhausted, "thread", error, "started", "raise the process limit")
        })?;
        Ok(JobHandle {
            job,
            works,
            changed,
            closed: AtomicBool::new(false),
            last_step: AtomicU64::new(u64::MAX),
            transports: Mutex::default(),
        })
    }

    /// Hands work to the compute thread. It is gone only once the job failed, which every later call reports.
    pub(crate) fn perform(&self, work: Option<Work>) {
        if let Some(work) = work {
            let _ = self.works.send(work);
        }
    }

    /// Asks `check` now and after every change until it has an answer, an error, or `deadline` passes.
    pub(crate) async fn until<T>(
        &self,
        deadline: Instant,
        mut check: impl FnMut() -> Result<Option<T>, Fault>,
        late: impl FnOnce() -> Fault,
    ) -> Result<T, Fault> {
        let mut changed = self.changed.clone();
        loop {
            changed.borrow_and_update();
            if self.closed.load(Ordering::Acquire) {
                return Err(not_found(self.job.spec().name.as_str()));
            }
            if let Some(value) = check()? {
                return Ok(value);
            }
            match timeout_at(deadline, changed.changed()).await {
                Ok(Ok(())) => {}
                // The observer lives as long as the job, so only the deadline ends the wait.
                Ok(Err(_)) | Err(_) => return Err(late()),
            }
        }
    }

    /// What a wait that came to its deadline says.
    pub(crate) fn late(&self, field: &str, value: impl std::fmt::Display) -> Fault {
        let waiting = self.job.waiting_for().unwrap_or_else(|| "the commit of the step in hand".to_string());
        let remedy = format!("the job waits for {waiting}: see that worker, or raise the deadline");
        Fault::new(FaultKind::Deadline, field, value, "there in time", remedy)
    }

    /// A rank has joined over this transport.
    pub(crate) fn came_by(&self, rank: Rank, transport: &'static str) {
        self.transports.lock().unwrap_or_else(PoisonError::into_inner).insert(rank, transport);
    }

    /// Empty for a rank that has not joined this process.
    pub(crate) fn transport_of(&self, rank: Rank) -> &'static str {
        self.transports.lock().unwrap_or_else(PoisonError::into_inner).get(&rank).copied().unwrap_or_default()
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// From now on takes contributions to the step in hand only, if one is begun. Returns the version to wait for.
    pub(crate) fn finish_step_in_hand(&self) -> Version {
        let version = self.job.progress().version;
        let last = version.0 + u64::from(self.job.is_step_begun());
        self.last_step.store(last, Ordering::Release);
        Version(last)
    }

    pub(crate) fn check_step(&self, step: Step) -> Result<(), Fault> {
        let last = self.last_step.load(Ordering::Acquire);
        if step.0 <= last {
            return Ok(());
        }
        let remedy = "the server is draining: start it again, and restore its last checkpoint unless its tier survives";
        Err(Fault::new(FaultKind::Unavailable, "step", step.0, format!("at most {last}"), remedy))
    }

    /// Makes every waiter fail with "no such job".
    fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }
}

/// The compute thread: works in the order they come, what follows from one after those already waiting. So the sums of
/// a delayed job's next step are formed between the updates of this one.
fn perform_all(job: &Job, inbox: &mpsc::Receiver<Work>) {
    job.compute().pool().adopt_caller();
    let mut works = VecDeque::new();
    while let Ok(work) = inbox.recv() {
        works.push_back(work);
        while let Some(work) = works.pop_front() {
            match job.perform(work) {
                Ok(next) => works.extend(next),
                Err(_) => return,
            }
            works.extend(inbox.try_iter());
        }
    }
}

pub(crate) fn not_found(name: &str) -> Fault {
    Fault::new(
        FaultKind::NotFound,
        "job",
        format!("{name:?}"),
        "open on this server",
        "open it; a server with the memory tier forgets its jobs when it restarts: restore the last checkpoint",
    )
}

impl Jobs {
    pub(crate) fn new(budget: Budget, storage: Storage, compute: Arc<Compute>) -> Jobs {
        Jobs { jobs: Mutex::new(BTreeMap::new()), opening: Mutex::new(()), budget, storage, compute }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<JobName, Arc<JobHandle>>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn budget(&self) -> &Budget {
        &self.budget
    }

    pub(crate) fn get(&self, name: &str) -> Result<Arc<JobHandle>, Fault> {
        let name = JobName::parse("job", name)?;
        self.lock().get(&name).cloned().ok_or_else(|| not_found(name.as_str()))
    }

    pub(crate) fn all(&self) -> Vec<Arc<JobHandle>> {
        self.lock().values().cloned().collect()
    }

    /// Finds the job or creates it. Blocks while memory is touched. True when it was created.
    pub(crate) fn open(
        &self,
        spec: JobSpec,
        placement: Placement,
        server: ServerId,
    ) -> Result<(bool, Arc<JobHandle>), Fault> {
        let _opening = self.opening.lock().unwrap_or_else(PoisonError::into_inner);
        let found = self.lock().get(&spec.name).cloned();
        if let Some(handle) = found {
            let job = &handle.job;
            job.spec().same_as(&spec)?;
            job.placement().same_owners(&placement)?;
            if job.server() != server {
                let remedy = "name the same servers in the same order as when the job was opened";
                return Err(Fault::new(FaultKind::Conflict, "server", server.0, job.server().0, remedy));
            }
            return Ok((false, handle));
        }
        let name = spec.name.clone();
        let handle = JobHandle::start(
            spec,
            placement,
            server,
            &self.budget,
            &self.storage,
            Arc::clone(&self.compute),
        )?;
        let handle = Arc::new(handle);
        self.lock().insert(name, Arc::clone(&handle));
        Ok((true, handle))
    }

    pub(crate) fn delete(&self, name: &str) -> Result<(), Fault> {
        let name = JobName::parse("job", name)?;
        let handle = self.lock().remove(&name).ok_or_else(|| not_found(name.as_str()))?;
        handle.close();
        // Waiters look again, find the job closed and let go of it.
        handle.job.nudge();
        Ok(())
    }
}
