//! Result of each job's last checkpoint on this server. `longshore status` shows it without reading any disk.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::UNIX_EPOCH,
};

use longshore_proto::{Fault, FaultKind, Version};
use longshore_wire::v1;

/// Checkpoints since the server started.
#[derive(Default)]
pub(crate) struct CheckpointLog {
    jobs: Mutex<BTreeMap<String, v1::CheckpointStatus>>,
}

impl CheckpointLog {
    pub(crate) fn sealed(&self, job: &str, name: &str, version: Version) {
        let status = v1::CheckpointStatus {
            name: name.to_string(),
            version: version.0,
            sealed_unix_ms: now(),
            ..Default::default()
        };
        self.lock().insert(job.to_string(), status);
    }

    /// Records a failure. A passed version and a taken name do not count: the caller retries with another.
    pub(crate) fn failed(&self, job: &str, name: &str, fault: &Fault) {
        if fault.field == "version" || fault.kind == FaultKind::Conflict {
            return;
        }
        tracing::warn!(job, name, %fault, "no checkpoint written");
        let mut jobs = self.lock();
        let status = jobs.entry(job.to_string()).or_default();
        (status.failure, status.failed_unix_ms) = (fault.to_string(), now());
    }

    pub(crate) fn of(&self, job: &str) -> Option<v1::CheckpointStatus> {
        self.lock().get(job).cloned()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, v1::CheckpointStatus>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn now() -> u64 {
    UNIX_EPOCH.elapsed().map_or(0, |since| since.as_millis() as u64)
}
