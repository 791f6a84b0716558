//! The gRPC services: messages in, domain calls, messages out. Decisions are left to the engine. Calls run on the
//! network runtime, and hand work on files or much memory to blocking threads.

mod admin;
mod checkpoint;
mod convert;
mod describe;
mod export;
mod fetch;
mod permitted;
mod pull;
mod push;
mod restore;
mod room;
mod stats;
mod tensors;
mod training;
mod watch;

use std::{path::PathBuf, sync::Arc, time::Duration};

use longshore_engine::{checkpoint::Store, io::Drives, job::Job, step::RankProgress};
use longshore_proto::{Fault, FaultKind, limits::DEFAULT_DEADLINE_MS};
use longshore_wire::direct::Bounds;
use tokio::{
    sync,
    time::{Instant, timeout_at},
};
use tonic::Status;

pub(crate) use self::{convert::scaling as scaling_of, tensors::DataPlane};
use crate::{
    jobs::{JobHandle, Jobs, Turns},
    memfd::Links,
    refusals,
    tasks::blocking,
    trust::Register,
};

/// Shared state of all services. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Services {
    pub(crate) jobs: Arc<Jobs>,
    pub(crate) draining: Draining,
    pub(crate) checkpoints: Option<Arc<Store>>,
    /// Turns of calls that read or seal a job's checkpoints. Turns keep such calls from taking a thread each.
    pub(crate) folders: Arc<Turns>,
    /// Sealed checkpoints kept of each job; None keeps all.
    pub(crate) checkpoint_keep: Option<usize>,
    pub(crate) links: Arc<Links>,
    /// Changes when a process fences an earlier one. Push calls then end the chunks of fenced processes.
    pub(crate) fences: sync::watch::Sender<u64>,
    /// This server is a witness, which keeps no shard of any job.
    pub(crate) is_witness: bool,
    /// Limits of the memory that strangers share.
    pub(crate) bounds: Arc<Bounds>,
    /// Transport of these calls: tcp, tls or unix.
    pub(crate) transport: &'static str,
    /// Bytes that the drives may be written with over their lifetime; 0 if unknown.
    pub(crate) drive_endurance: u64,
    /// Folder of this server's certificates, for calls to other servers.
    pub(crate) tls_dir: Option<PathBuf>,
    /// Certificates and identities. None without encryption.
    pub(crate) register: Option<Arc<Register>>,
    /// Request counters of the state directories' drives.
    pub(crate) drives: Arc<Drives>,
}

impl Services {
    /// Returns the transport of a rank's payloads: tcp, tls, unix or memfd. Empty while its process has no connection.
    pub(crate) fn transport_of(&self, handle: &Arc<JobHandle>, rank: &RankProgress) -> &'static str {
        let (processes, process) = (&handle.processes, rank.incarnation.unwrap_or_default());
        if self.links.linked(handle, rank.rank) {
            "memfd"
        } else if rank.left || processes.is_connected(rank.rank, process) {
            processes.transport(rank.rank)
        } else {
            ""
        }
    }

    /// Returns the state of a rank, in a word or two.
    pub(crate) fn standing(&self, handle: &Arc<JobHandle>, rank: &RankProgress) -> &'static str {
        let Some(process) = rank.incarnation else { return "never joined" };
        let is_there = || handle.processes.is_watching(rank.rank, process);
        match rank.left {
            true => "left",
            false if is_there() || !self.transport_of(handle, rank).is_empty() => "joined",
            false => "not connected",
        }
    }
}

/// Logs and counts a refused request once, at the edge, and returns its status.
fn refuse(call: &'static str, job: &str, fault: Fault) -> Status {
    tracing::debug!(call, job, kind = fault.kind.name(), %fault, "refused");
    refusals::status(&fault)
}

/// Returns the deadline of a wait without a caller's deadline.
fn default_deadline() -> Instant {
    Instant::now() + Duration::from_millis(DEFAULT_DEADLINE_MS)
}

/// Changes a job between two steps: a pause, a resume, or another placement. The job's tier stores the change with the
/// current version, once that version is durable.
async fn stand(
    handle: &Arc<JobHandle>,
    change: impl Fn(&Job) -> Result<bool, Fault> + Send + Sync + 'static,
) -> Result<(), Fault> {
    let (deadline, change) = (default_deadline(), Arc::new(change));
    let mut changes = handle.changes();
    loop {
        changes.borrow_and_update();
        let (job, change) = (Arc::clone(&handle.job), Arc::clone(&change));
        // The change may flush drives, so it runs on a blocking thread.
        if blocking(move || change(&job)).await? {
            return Ok(());
        }
        if timeout_at(deadline, changes.changed()).await.is_err() {
            handle.until_durable(handle.job.progress().version, deadline).await?;
            return Err(handle.late("job.version", "in the middle of an update or a transfer"));
        }
    }
}

/// Tells whether a drain has begun, and how it ended. Cheap to clone.
#[derive(Clone, Default)]
pub(crate) struct Draining {
    begun: sync::watch::Sender<bool>,
    ended: sync::watch::Sender<Option<Result<(), Fault>>>,
}

impl Draining {
    pub(crate) fn begin(&self) {
        self.begun.send_replace(true);
    }

    pub(crate) fn end(&self, ended: Result<(), Fault>) {
        self.ended.send_replace(Some(ended));
    }

    /// Begins a drain, and returns once it is over.
    ///
    /// # Errors
    /// The last failure to write a checkpoint, or the refusal of an embedded server.
    pub(crate) async fn drain(&self) -> Result<(), Fault> {
        let mut ended = self.ended.subscribe();
        if ended.borrow().is_none() {
            self.begin();
        }
        // The sender lives as long as self, so the wait ends only with the drain.
        ended.wait_for(Option::is_some).await.ok().and_then(|ended| ended.clone()).unwrap_or(Ok(()))
    }

    /// Refuses, with `Unavailable`, once a drain has begun.
    pub(crate) fn refuse(&self) -> Result<(), Fault> {
        if !*self.begun.borrow() {
            return Ok(());
        }
        Err(Fault::new(
            FaultKind::Unavailable,
            "server",
            "draining",
            "serving",
            "use another server, or start it again",
        ))
    }

    pub(crate) async fn wait(&self) {
        let mut begun = self.begun.subscribe();
        // The sender lives as long as self, so the wait ends only with a drain.
        let _ = begun.wait_for(|begun| *begun).await;
    }
}
