//! Result of a job's last checkpoint on this server. `longshore status` shows it without reading any disk.

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::UNIX_EPOCH,
};

use longshore_proto::{Fault, FaultKind, Version};
use longshore_wire::v1;

/// Checkpoints since the job was opened here; None until one was tried.
#[derive(Default)]
pub(crate) struct CheckpointLog(Mutex<Option<v1::CheckpointStatus>>);

impl CheckpointLog {
    pub(crate) fn sealed(&self, name: &str, version: Version) {
        let status = v1::CheckpointStatus {
            name: name.to_string(),
            version: version.0,
            sealed_unix_ms: now(),
            ..Default::default()
        };
        *self.lock() = Some(status);
    }

    /// Records a failure. A passed version and a taken name do not count: the caller retries with another.
    pub(crate) fn failed(&self, job: &str, name: &str, fault: &Fault) {
        if fault.field == "version" || fault.kind == FaultKind::Conflict {
            return;
        }
        let fault = fault.cut();
        tracing::warn!(job, name, %fault, "no checkpoint written");
        let mut status = self.lock();
        let status = status.get_or_insert_default();
        (status.failure, status.failed_unix_ms) = (fault.to_string(), now());
    }

    pub(crate) fn last(&self) -> Option<v1::CheckpointStatus> {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Option<v1::CheckpointStatus>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn now() -> u64 {
    UNIX_EPOCH.elapsed().map_or(0, |since| since.as_millis() as u64)
}
