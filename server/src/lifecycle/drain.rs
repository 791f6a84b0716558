//! A drain, started by SIGTERM, SIGINT or Admin.Drain. Its steps run on the network runtime, in this order:
//!
//! 1. Report NOT_SERVING.
//! 2. Accept contributions to the current step alone.
//! 3. Wait until that step is decided and updated.
//! 4. Write checkpoints if configured.
//! 5. Answer the calls of Admin.Drain, and stop serving.
//!
//! All jobs begin step 2 before the drain waits for any of them, and share one deadline. So many jobs drain in the time
//! of one job.

use std::{sync::Arc, time::Duration};

use futures_util::future::join_all;
use longshore_engine::{
    checkpoint::{Part, Store},
    job::Job,
    step::Phase,
};
use longshore_proto::{Fault, FaultKind, Version};
use longshore_wire::v1::{tensors_server::TensorsServer, training_server::TrainingServer};
use tokio::time::{Instant, sleep, timeout};

use super::{Server, ServerError};
use crate::{jobs::JobHandle, service::Services, tasks::blocking};

/// Time for open streams to finish once a drain is over.
const STOP_GRACE: Duration = Duration::from_secs(2);
/// Interval at which the end of a job's connections is looked for.
const LOOK: Duration = Duration::from_millis(100);
/// Largest number of checkpoints of one name, told apart by a number behind the name.
const MOST_NAMES: u32 = 100;

impl Server {
    /// Finishes the current step, writes checkpoints if configured, and stops.
    pub async fn drain(mut self) -> Result<(), ServerError> {
        self.services.draining.begin();
        self.health.set_not_serving::<TrainingServer<Services>>().await;
        self.health.set_not_serving::<TensorsServer<Services>>().await;
        let deadline = Instant::now() + self.config.drain_deadline;
        let handles = self.services.jobs.all();
        tracing::info!(jobs = handles.len(), "draining");
        let told: Vec<_> = handles.iter().map(|handle| (handle, handle.finish_step_in_hand())).collect();
        join_all(told.into_iter().map(|(handle, last)| finish(handle, last, deadline))).await;
        let checkpointed = self.write_checkpoints(&handles).await;
        self.services.draining.end(checkpointed.clone());
        self.stop.send_replace(true);
        if timeout(STOP_GRACE, &mut self.serving).await.is_err() {
            // Clients with long calls may not hang up, so the calls are aborted.
            self.serving.abort();
        }
        tracing::info!("stopped");
        Ok(checkpointed?)
    }

    /// Writes one checkpoint of each job, in sequence: a disk is slower with several at a time. Returns the last
    /// failure.
    async fn write_checkpoints(&self, handles: &[Arc<JobHandle>]) -> Result<(), Fault> {
        let mut written = Ok(());
        if !self.config.checkpoint_on_drain {
            return written;
        }
        // The deadline bounds waits for unfinished updates. A job without unfinished updates is written even after the
        // deadline.
        let deadline = std::time::Instant::now() + self.config.drain_deadline;
        for handle in handles {
            if let Err(fault) = self.checkpoint(handle, deadline).await {
                tracing::error!(job = %handle.job.spec().name, %fault, "no checkpoint written");
                written = Err(fault);
            }
        }
        written
    }

    async fn checkpoint(&self, handle: &Arc<JobHandle>, deadline: std::time::Instant) -> Result<(), Fault> {
        let Some(store) = self.services.checkpoints.clone() else { return Ok(()) };
        let (job, keep) = (Arc::clone(&handle.job), self.services.checkpoint_keep);
        if handle.is_closed() || job.progress().phase == Phase::Loading {
            return Ok(());
        }
        blocking(move || {
            let (name, part) = write_part(&store, &job, deadline)?;
            let (job, version, servers) = (&job.spec().name, part.version, part.servers);
            // No client seals the checkpoint, so the last server of a shared folder does: it finds all parts.
            let sealed = store.seal_if_whole(job, &name, servers)?;
            if sealed {
                store.prune(job, keep, &name);
            }
            tracing::info!(%job, %version, name, sealed, servers, "checkpoint written on drain");
            Ok(())
        })
        .await
    }
}

/// Writes this server's part of a checkpoint. After a step back another state may have taken the name. The part then
/// gets the first free of name.2, name.3 and so on. Servers that share a folder find the same names taken.
fn write_part(store: &Store, job: &Arc<Job>, deadline: std::time::Instant) -> Result<(String, Part), Fault> {
    let version = job.progress().version;
    let name = format!("drain-{:08}", version.0);
    let mut number = 1;
    loop {
        let numbered = if number == 1 { name.clone() } else { format!("{name}.{number}") };
        number += 1;
        match store.write(0, job, &numbered, Some(version), deadline) {
            Err(fault) if fault.kind == FaultKind::Conflict && number <= MOST_NAMES => {}
            written => return written.map(|part| (numbered, part)),
        }
    }
}

/// Waits for the current step, at most until the deadline. A job without connections of ranks is not waited for: its
/// step stays unfinished.
async fn finish(handle: &Arc<JobHandle>, last: Version, deadline: Instant) {
    let done = || {
        let progress = handle.job.progress();
        Ok((progress.version >= last).then_some(()))
    };
    let late = || handle.late("drain", last);
    let abandoned = async {
        while !handle.seats.are_empty() {
            sleep(LOOK).await;
        }
    };
    let finished = tokio::select! {
        finished = handle.until(deadline, done, late) => finished,
        () = abandoned => Ok(()),
    };
    if let Err(fault) = finished {
        tracing::warn!(job = %handle.job.spec().name, %fault, "the step in hand was not finished");
    }
    let job = Arc::clone(&handle.job);
    let settled = tokio::task::spawn_blocking(move || job.protocol.settle(deadline.into_std())).await;
    if let Ok(Err(fault)) = settled {
        tracing::warn!(job = %handle.job.spec().name, %fault, "updates were not finished");
    }
    if let Err(fault) = handle.until_durable(handle.job.progress().version, deadline).await {
        tracing::warn!(job = %handle.job.spec().name, %fault, "the last version is not durable");
    }
}
