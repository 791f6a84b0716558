//! The gRPC services: messages in, domain calls, messages out. No decision is made here.

mod admin;
mod checkpoint;
mod convert;
mod export;
mod permitted;
mod pull;
mod push;
mod restore;
mod room;
mod stats;
mod tensors;
mod training;
mod upload;
mod watch;

use std::{sync::Arc, time::Duration};

use longshore_engine::{checkpoint::Store, io::Drives, job::Job};
use longshore_proto::{Fault, FaultKind, Rank, limits::DEFAULT_DEADLINE_MS};
use longshore_wire::direct::Bounds;
use tokio::time::Instant;
use tonic::Status;

pub(crate) use self::tensors::DataPlane;
use crate::{
    checkpoints::CheckpointLog,
    draining::Draining,
    jobs::{JobHandle, Jobs},
    memfd::Links,
    refusals,
};

/// What every service works on. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Services {
    pub(crate) jobs: Arc<Jobs>,
    pub(crate) draining: Draining,
    pub(crate) checkpoints: Option<Arc<Store>>,
    pub(crate) checkpoint_log: Arc<CheckpointLog>,
    /// How many sealed checkpoints are kept of each job; None keeps all.
    pub(crate) checkpoint_keep: Option<usize>,
    pub(crate) links: Arc<Links>,
    /// What strangers share of this server's memory.
    pub(crate) bounds: Arc<Bounds>,
    /// The transport of these calls: tcp, tls or unix.
    pub(crate) transport: &'static str,
    /// How many bytes the drives may be written with; 0 if that is not known.
    pub(crate) drive_endurance: u64,
    /// What the drives of the state directories were asked.
    pub(crate) drives: Arc<Drives>,
}

impl Services {
    /// How a rank's payloads come: tcp, unix or memfd; empty until it joined this process.
    pub(crate) fn transport_of(&self, handle: &Arc<JobHandle>, rank: Rank) -> &'static str {
        if self.links.linked(handle, rank) { "memfd" } else { handle.transport_of(rank) }
    }
}

/// Logs and counts a refused request once, here at the edge, and turns it into a status.
fn refuse(call: &'static str, job: &str, fault: Fault) -> Status {
    tracing::debug!(call, job, kind = fault.kind.name(), %fault, "refused");
    refusals::status(&fault)
}

/// The deadline of a wait for which the caller named none.
fn default_deadline() -> Instant {
    Instant::now() + Duration::from_millis(DEFAULT_DEADLINE_MS)
}

/// Pauses or resumes a job. Its tier keeps that with the job's current version, once the version is durable.
async fn stand(
    handle: &Arc<JobHandle>,
    change: impl Fn(&Job) -> Result<bool, Fault> + Send + Sync + 'static,
) -> Result<(), Fault> {
    let (deadline, change) = (default_deadline(), Arc::new(change));
    loop {
        let (job, change) = (Arc::clone(&handle.job), Arc::clone(&change));
        // The change may flush drives.
        if blocking(move || change(&job)).await? {
            return Ok(());
        }
        handle.until_durable(handle.job.progress().version, deadline).await?;
    }
}

/// Runs engine work that may take long away from the network threads.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Fault> + Send + 'static,
) -> Result<T, Fault> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| {
        Err(Fault::new(
            FaultKind::Internal,
            "task",
            error,
            "finished",
            "see the server's log; this is a defect",
        ))
    })
}
