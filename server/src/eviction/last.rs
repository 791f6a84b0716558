//! The last act of an eviction, once a job's state is safe elsewhere.

use std::{sync::Arc, time::Duration};

use crate::{
    jobs::{JobHandle, Refuge},
    service::Services,
};

/// The longest wait for updates that are decided already.
pub(super) const SETTLE: Duration = Duration::from_secs(60);

/// Evicts a job whose state is safe elsewhere, unless it was used meanwhile, and says so.
pub(super) fn evict(services: &Services, handle: Arc<JobHandle>, limit: Duration, refuge: &Refuge) {
    let (job, bytes) = (handle.job.spec().name.clone(), handle.job.memory_bytes());
    match services.jobs.evict(handle, limit, refuge) {
        Ok(true) => {
            let refuge = refuge.to_string();
            tracing::info!(
                target: "audit", who = "this server", call = "evict", job = ?job.as_str(), outcome = "answered",
                bytes, ?limit, refuge, "an idle job was evicted"
            );
        }
        Ok(false) => {}
        Err(fault) => tracing::warn!(%job, %fault, "files of an evicted job were not removed"),
    }
}
