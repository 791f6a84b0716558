//! A job as gRPC calls use it: the engine's job with its compute thread, counters and waits with a deadline. Each
//! handle owns one thread, named `job-NAME`.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use longshore_engine::{
    admission::Budget,
    job::{Compute, Job},
    step::{Wanted, Work},
    tier::{Storage, StoredJob},
};
use longshore_proto::{Fault, FaultKind, Placement, ServerId, Step, Version};
use tokio::{sync::watch, time::Instant};

use super::{
    Fetching, Hashes,
    computing::Computing,
    counters::{Busy, CheckpointLog, Pace, Traffic},
    hashing::Hashing,
    history::{Decided, History},
    idle::Idle,
    ranks::{Processes, Seats},
    restores::Restores,
    stages::Stages,
    waits::Decisions,
};

use crate::lock::lock;

/// A job with its compute thread, which ends when the last user drops the handle.
pub(crate) struct JobHandle {
    pub(crate) job: Arc<Job>,
    computing: Computing,
    pub(super) changed: watch::Receiver<u64>,
    pub(super) decisions: Decisions,
    /// Fault for every waiter once the job is no longer served.
    pub(super) closed: watch::Sender<Option<Fault>>,
    /// Last step that accepts contributions once a drain has begun.
    last_step: AtomicU64,
    /// Identity that opened the job. None without identities.
    pub(crate) owner: Option<String>,
    pub(crate) idle: Idle,
    pub(crate) processes: Arc<Processes>,
    pub(crate) pace: Pace,
    pub(crate) history: History,
    pub(crate) busy: Arc<Busy>,
    pub(crate) traffic: Traffic,
    pub(crate) stages: Arc<Stages>,
    hashing: Hashing,
    pub(crate) restores: Restores,
    pub(crate) seats: Seats,
    pub(crate) checkpoints: CheckpointLog,
    pub(crate) fetching: Fetching,
    /// Servers that an operator wants the job to have.
    pub(crate) wanted: Mutex<Wanted>,
}

impl JobHandle {
    pub(crate) fn wanted(&self) -> Wanted {
        lock(&self.wanted).clone()
    }

    /// Keeps a wish for other servers, unless a later wish is known.
    pub(crate) fn want(&self, wanted: Wanted) {
        self.change_wish(|known, placement| known.take(wanted, placement));
        self.job.protocol.notify();
    }

    /// Forgets the servers that an operator has named as lost, once they have left the job. Other servers may then use
    /// their addresses.
    pub(crate) fn forget_losses(&self) {
        self.change_wish(Wanted::forget_losses);
    }

    /// Changes the wish, and tells the job its losses before another change: the job keeps the latest list.
    fn change_wish(&self, change: impl FnOnce(&mut Wanted, &Placement)) {
        let works = {
            let mut known = lock(&self.wanted);
            change(&mut known, &self.job.placement());
            self.job.lose(known.lost.clone())
        };
        self.perform(works);
    }

    /// Takes the address at which a server of the job answers now. Shards are then fetched from this address, and the
    /// wish names it too.
    pub(crate) fn readdress(&self, server: ServerId, address: &str) {
        let Some(before) = self.job.readdress(server, address) else { return };
        tracing::info!(job = %self.job.spec().name, %server, before, address, "a server of the job has another address");
        let mut known = lock(&self.wanted);
        known.servers.iter_mut().filter(|wanted| **wanted == before).for_each(|of| *of = address.to_string());
    }

    /// Returns the elements of this server's shards, padding included.
    pub(crate) fn elements(&self) -> u64 {
        let owned = self.job.owned_at(self.job.progress().version.next_step());
        owned.into_iter().map(|shard| self.job.layout().shard_len(shard)).sum()
    }

    /// Appends a decision to the history, with the counters at this moment.
    pub(crate) fn note(&self, decided: Decided) {
        let (pushed_bytes, pulled_bytes) = self.job.traffic();
        let update_seconds = self.busy.updates().as_secs_f64();
        self.history.note(Decided { pushed_bytes, pulled_bytes, update_seconds, ..decided });
    }

    /// Opens the job in any phase. The job's compute thread then finishes updates that were decided under an earlier
    /// process.
    pub(super) fn start(
        job: StoredJob,
        budget: &Budget,
        storage: &Storage,
        compute: Arc<Compute>,
    ) -> Result<JobHandle, Fault> {
        let StoredJob { spec, placement, server, owner } = job;
        let (moved, changed) = watch::channel(0u64);
        let observer = Box::new(move || moved.send_modify(|count| *count = count.wrapping_add(1)));
        let job = Arc::new(Job::open(spec, placement, server, budget, storage, compute, observer)?);
        let busy = Arc::<Busy>::default();
        let stages = Arc::<Stages>::default();
        let computing = Computing::start(&job, &busy, &stages)?;
        let unfinished = job.protocol.take_unfinished();
        let world_size = job.spec().world_size;
        let (traffic, seats) = (Traffic::new(world_size), Seats::new(world_size));
        let handle = JobHandle {
            idle: Idle::new(&job),
            decisions: Decisions::new(job.progress().version),
            job,
            owner,
            computing,
            changed,
            closed: watch::Sender::new(None),
            last_step: AtomicU64::new(u64::MAX),
            processes: Arc::default(),
            pace: Pace::default(),
            history: History::default(),
            busy,
            traffic,
            stages,
            hashing: Hashing::default(),
            restores: Restores::default(),
            seats,
            checkpoints: CheckpointLog::default(),
            fetching: Fetching::default(),
            wanted: Mutex::default(),
        };
        handle.perform(unfinished);
        Ok(handle)
    }

    /// Returns the form in which tiers store the job.
    pub(super) fn stored(&self) -> StoredJob {
        let (job, owner) = (&self.job, self.owner.clone());
        StoredJob {
            spec: job.spec().clone(),
            placement: job.opened_with().clone(),
            server: job.server(),
            owner,
        }
    }

    /// Performs work on the compute thread, or on this thread if the job is small.
    pub(crate) fn perform(&self, works: impl IntoIterator<Item = Work>) {
        works.into_iter().for_each(|work| self.computing.perform(work));
    }

    pub(crate) async fn hashes(&self, deadline: Instant) -> Result<Hashes, Fault> {
        let mut closing = self.closing();
        let closed =
            async move { closing.wait_for(Option::is_some).await.ok().and_then(|fault| fault.clone()) };
        tokio::select! {
            biased;
            Some(fault) = closed => Err(fault),
            hashes = self.hashing.hashes(&self.job, deadline) => hashes,
        }
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.borrow().is_some()
    }

    /// Stops contributions beyond the step that has begun, or beyond the present version if none has. Returns the
    /// version to wait for.
    pub(crate) fn finish_step_in_hand(&self) -> Version {
        let version = self.job.progress().version;
        let last = version.0 + u64::from(self.job.protocol.is_step_begun());
        self.last_step.store(last, Ordering::Release);
        Version(last)
    }

    /// Returns how long the job has been unused.
    pub(crate) fn look(&self) -> Duration {
        self.idle.look(&self.job, self.restores.begun())
    }

    pub(crate) fn check_step(&self, step: Step) -> Result<(), Fault> {
        let last = self.last_step.load(Ordering::Acquire);
        if step.0 <= last {
            return Ok(());
        }
        let remedy = "the server is draining: start it again, and restore its last checkpoint unless its tier survives";
        Err(Fault::new(FaultKind::Unavailable, "step", step.0, format!("at most {last}"), remedy))
    }

    /// Fails every waiter with this fault.
    pub(super) fn close(&self, fault: Fault) {
        self.job.end_snapshots(&fault);
        self.closed.send_if_modified(|closed| closed.is_none() && closed.replace(fault).is_none());
        self.job.close_load();
        self.seats.close();
        // Woken waiters find the job closed and drop it.
        self.job.protocol.notify();
    }

    /// Returns a channel that yields the fault once the job is closed. The channel does not keep the job alive.
    pub(crate) fn closing(&self) -> watch::Receiver<Option<Fault>> {
        self.closed.subscribe()
    }

    /// Returns a channel that tells of every change of the job, and closes when the job's last user has dropped it.
    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.changed.clone()
    }
}
