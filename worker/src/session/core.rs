//! What all parts of a session share, and the two ways between the blocking outside and the asynchronous inside.

use std::{
    future::Future,
    num::NonZeroUsize,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::Duration,
};

use longshore_proto::{
    Commit, Fault, FaultKind, Incarnation, JobName, JobSpec, Layout, Origin, Placement, ShardId, Step,
    Version,
};
use tokio::{
    runtime::{Handle, Runtime},
    sync::watch,
    task::AbortHandle,
};

use super::{Options, patience::Pause, peer::Peer, vigil::Vigil};
use crate::{
    device::Pool,
    error::{Environment, Error, Misuse, Result},
    memfd::Links,
    push::{Lanes, Retained},
};

/// One frames while the other converts and checks.
const RUNTIME_THREADS: usize = 2;
const RETAINED: &str = "gradients retained until their step is committed";

pub(crate) struct Core {
    pub(crate) options: Options,
    pub(crate) layout: Layout,
    pub(crate) placement: Placement,
    pub(crate) peers: Vec<Peer>,
    pub(crate) links: Links,
    /// The first failure found in the background; every later call returns it.
    pub(crate) failure: watch::Sender<Option<Error>>,
    pub(crate) pause: watch::Sender<Pause>,
    incarnation: AtomicU64,
    /// The version that it was joined at.
    joined_at: AtomicU64,
    /// A pipeline has begun: from then on a server that waits for weights has lost them.
    trained: AtomicBool,
    pub(crate) feed_pool: Pool,
    pub(crate) chunk_pool: Pool,
    pub(crate) retained: Retained,
    pub(crate) lanes: OnceLock<Lanes>,
    /// Rank 0's newest ones, for a server that restarted behind them.
    commits: Mutex<Vec<Arc<OwnCommit>>>,
    pub(crate) meter: Meter,
    pub(super) vigil: Vigil,
    /// For each server, why it stopped taking gradients: the cause of what fails after it.
    troubles: Mutex<Vec<Option<Fault>>>,
    tasks: Mutex<Vec<AbortHandle>>,
    runtime: Engine,
}

/// A commit that this rank 0 made, and from which contributions on each server.
#[derive(Debug)]
pub(crate) struct OwnCommit {
    pub(crate) commit: Commit,
    /// By server.
    pub(crate) origins: Vec<Origin>,
}

/// Totals since the session began; the pipeline takes differences.
#[derive(Default)]
pub(crate) struct Meter {
    /// Nanoseconds the caller was blocked for weights, and by push back-pressure.
    pub(crate) weights_nanos: AtomicU64,
    pub(crate) push_nanos: AtomicU64,
    pub(crate) pushed_bytes: AtomicU64,
    pub(crate) pulled_bytes: AtomicU64,
}

impl Meter {
    pub(crate) fn add(counter: &AtomicU64, waited: Duration) {
        counter.fetch_add(waited.as_nanos() as u64, Relaxed);
    }
}

/// The runtime: our own, or one that was given.
pub(super) struct Engine {
    handle: Handle,
    own: Option<Runtime>,
}

impl Engine {
    pub(super) fn start(given: Option<Handle>) -> Result<Engine> {
        if let Some(handle) = given {
            return Ok(Engine { handle, own: None });
        }
        // With two cores a second one gets in the way of the other end's, or of the caller.
        let cores = thread::available_parallelism().map_or(1, NonZeroUsize::get);
        let built = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(RUNTIME_THREADS.min(cores.div_ceil(2)))
            .thread_name("longshore-io")
            .enable_all()
            .build();
        let own = built.map_err(|error| Environment {
            what: "starting the session's threads",
            cause: error.to_string(),
            remedy: "raise the limits on processes and open files (ulimit -u, ulimit -n)",
        })?;
        Ok(Engine { handle: own.handle().clone(), own: Some(own) })
    }

    /// Blocks this thread on `future`. An error instead of tokio's panic when it is a runtime's own thread.
    pub(super) fn block_on<T>(&self, future: impl Future<Output = Result<T>>) -> Result<T> {
        if Handle::try_current().is_ok() {
            let message = "a blocking call of the worker library was made on an async runtime's thread: use \
                           tokio::task::spawn_blocking or a thread of your own";
            return Err(Misuse(message).into());
        }
        self.handle.block_on(future)
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // The last clone of the core may go on a thread of this very runtime, where waiting for it would panic.
        if let Some(own) = self.own.take() {
            own.shutdown_background();
        }
    }
}

impl Core {
    pub(super) fn new(
        options: Options,
        layout: Layout,
        placement: Placement,
        peers: Vec<Peer>,
        runtime: Engine,
    ) -> Core {
        let budget = options.host_budget.clone();
        let troubles = Mutex::new(vec![None; peers.len()]);
        Core {
            links: Links::new(peers.len()),
            troubles,
            layout,
            placement,
            peers,
            failure: watch::Sender::new(None),
            pause: watch::Sender::new(Pause::default()),
            incarnation: AtomicU64::new(0),
            joined_at: AtomicU64::new(0),
            trained: AtomicBool::new(false),
            feed_pool: Pool::new(budget.clone(), "weights under way"),
            chunk_pool: if options.transport.may_share() {
                Pool::shared(budget, RETAINED)
            } else {
                Pool::new(budget, RETAINED)
            },
            retained: Retained::default(),
            lanes: OnceLock::new(),
            commits: Mutex::default(),
            meter: Meter::default(),
            vigil: Vigil::default(),
            tasks: Mutex::new(Vec::new()),
            runtime,
            options,
        }
    }

    pub(crate) fn spec(&self) -> &JobSpec {
        &self.options.spec
    }

    pub(crate) fn job(&self) -> &JobName {
        &self.options.spec.name
    }

    pub(crate) fn incarnation(&self) -> Incarnation {
        Incarnation(self.incarnation.load(Relaxed))
    }

    pub(crate) fn set_incarnation(&self, incarnation: Incarnation) {
        self.incarnation.store(incarnation.0, Relaxed);
    }

    pub(super) fn set_joined_at(&self, version: Version) {
        self.joined_at.store(version.0, Relaxed);
    }

    pub(super) fn joined_at(&self) -> Version {
        Version(self.joined_at.load(Relaxed))
    }

    pub(crate) fn has_trained(&self) -> bool {
        self.trained.load(Relaxed)
    }

    pub(crate) fn begin_training(&self) {
        self.trained.store(true, Relaxed);
    }

    /// Index into `peers` of a shard's owner.
    pub(crate) fn owner(&self, shard: ShardId) -> usize {
        self.placement.owner(shard).0 as usize
    }

    /// Keeps the first failure and wakes everybody who waits.
    pub(crate) fn fail(&self, error: Error) {
        self.failure.send_if_modified(|failure| {
            let first = failure.is_none();
            if first {
                tracing::debug!(job = %self.job(), %error, "the session failed");
                *failure = Some(error);
            }
            first
        });
    }

    /// The failure found in the background, if any.
    pub(crate) fn check(&self) -> Result<()> {
        self.failure.borrow().clone().map_or(Ok(()), Err)
    }

    pub(crate) fn block_on<T>(&self, future: impl Future<Output = Result<T>>) -> Result<T> {
        self.runtime.block_on(future)
    }

    /// A task that ends with itself or with its handle.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) -> AbortHandle {
        self.runtime.handle.spawn(task).abort_handle()
    }

    /// A task whose result is awaited.
    pub(crate) fn spawn_joined<T: Send + 'static>(
        &self,
        task: impl Future<Output = T> + Send + 'static,
    ) -> tokio::task::JoinHandle<T> {
        self.runtime.handle.spawn(task)
    }

    /// A task that lives as long as the session. It holds the core, so `stop` must break that circle.
    pub(crate) fn spawn_for_session(&self, task: impl Future<Output = ()> + Send + 'static) {
        let handle = self.spawn(task);
        let mut tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        tasks.retain(|task| !task.is_finished());
        tasks.push(handle);
    }

    pub(super) fn stop(&self) {
        for task in self.tasks.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            task.abort();
        }
        self.fail(Misuse("the session has ended: connect a new one").into());
    }

    fn troubles(&self) -> MutexGuard<'_, Vec<Option<Fault>>> {
        self.troubles.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A server does not take gradients, as when it drains or is gone. Told once, until it takes one again.
    pub(crate) fn troubled(&self, server: usize, fault: &Fault) {
        let trouble = &mut self.troubles()[server];
        if trouble.is_none() && fault.kind == FaultKind::Unavailable {
            let (server, job, step) = (&self.peers[server].address, self.job(), self.retained.newest());
            tracing::warn!(server, %job, step, %fault, "waiting for a server: what it lacks is kept and sent again");
            *trouble = Some(fault.clone());
        }
    }

    pub(crate) fn untroubled(&self, server: usize) {
        self.troubles()[server] = None;
    }

    /// Why a server does not take gradients.
    pub(crate) fn trouble(&self, server: usize) -> Option<Fault> {
        self.troubles()[server].clone()
    }

    /// Remembers a commit of rank 0. Three cover a delayed step and an nvme server that came back one version behind.
    pub(crate) fn remember(&self, own: Arc<OwnCommit>) {
        const KEPT: usize = 3;
        let mut commits = self.commits();
        if commits.iter().all(|known| known.commit.step != own.commit.step) {
            commits.push(own);
        }
        let surplus = commits.len().saturating_sub(KEPT);
        commits.drain(..surplus);
    }

    /// Remembered commits after `step`, oldest first.
    pub(crate) fn commits_after(&self, step: Step) -> Vec<Arc<OwnCommit>> {
        self.commits().iter().filter(|own| own.commit.step > step).cloned().collect()
    }

    fn commits(&self) -> MutexGuard<'_, Vec<Arc<OwnCommit>>> {
        self.commits.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(crate) type SharedCore = Arc<Core>;
