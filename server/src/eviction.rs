//! Idle jobs are evicted: their memory is given back once their state is safe elsewhere.
//!
//! Each server decides for itself, and never gives back the only copy of a version that others would need: a job in memory
//! goes only once a whole checkpoint of this very version is sealed in the folder that this server sees. So the
//! servers of a job must share that folder. A job on drives only gives up its memory, and is opened there again.

use std::{
    collections::BTreeMap,
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

use longshore_engine::{job::Job, step::Phase};
use longshore_proto::{Fault, FaultKind, JobName, Version};

use crate::{
    jobs::{JobHandle, Refuge},
    service::Services,
    unasked::{self, Written},
};

/// How often jobs are looked at.
const LOOK: Duration = Duration::from_secs(1);
/// The longest wait for updates that are decided already.
const SETTLE: Duration = Duration::from_secs(60);
/// After a failure the next try comes when the job has idled for so much of its limit again, within these bounds.
const AGAIN: (Duration, Duration) = (LOOK, Duration::from_secs(600));

/// Looks after jobs until it is dropped.
pub(crate) async fn watch(services: Services) -> std::convert::Infallible {
    let mut eviction = Eviction { services, tries: BTreeMap::new() };
    loop {
        tokio::time::sleep(LOOK).await;
        // Checkpoints and the wait for a job's users block.
        let looked = tokio::task::spawn_blocking(move || {
            eviction.look();
            eviction
        });
        eviction = match looked.await {
            Ok(eviction) => eviction,
            Err(error) => {
                tracing::error!(%error, "idle jobs are looked after no more: this is a defect");
                std::future::pending().await
            }
        };
    }
}

struct Eviction {
    services: Services,
    tries: BTreeMap<JobName, Try>,
}

/// What was done so far to evict a job.
struct Try {
    /// Another job may have the name by now.
    of: Weak<JobHandle>,
    server: u32,
    next: Instant,
    /// A part that waits for those of other servers.
    written: Option<Written>,
}

impl Try {
    fn of(handle: &Arc<JobHandle>, next: Instant, written: Option<Written>) -> Try {
        Try { of: Arc::downgrade(handle), server: handle.job.server().0, next, written }
    }
}

impl Eviction {
    fn look(&mut self) {
        let names = self.services.jobs.names();
        let gone = |name: &JobName| !names.iter().any(|known| known == name.as_str());
        let gone: Vec<_> = self.tries.keys().filter(|name| gone(name)).cloned().collect();
        gone.iter().for_each(|name| self.give_up(name));
        // One at a time: whoever holds a job keeps others from closing it, and a checkpoint takes minutes.
        for name in names {
            let Ok(handle) = self.services.jobs.get(&name) else { continue };
            self.services.jobs.weigh(&handle);
            let idle = handle.idle.look(&handle.job);
            let limit = self.services.jobs.idle_limit(&handle);
            let name = handle.job.spec().name.clone();
            if self.tries.get(&name).is_some_and(|before| !std::ptr::eq(before.of.as_ptr(), &*handle)) {
                self.give_up(&name);
            }
            match limit.filter(|&limit| idle >= limit) {
                None => self.give_up(&name),
                Some(_) if self.services.draining.refuse().is_err() => {}
                Some(_) if self.tries.get(&name).is_some_and(|before| Instant::now() < before.next) => {}
                Some(limit) => self.try_to_evict(handle, &name, limit),
            }
        }
    }

    /// The job is used again, or gone: a part that nobody will seal takes no room.
    fn give_up(&mut self, name: &JobName) {
        let Some(Try { written: Some(written), server, .. }) = self.tries.remove(name) else { return };
        let Some(store) = &self.services.checkpoints else { return };
        if let Err(fault) = store.discard(name, &written.name, server, written.servers) {
            tracing::warn!(job = %name, %fault, "a part that is not needed was not removed");
        }
    }

    fn try_to_evict(&mut self, handle: Arc<JobHandle>, name: &JobName, limit: Duration) {
        let bytes = handle.job.memory_bytes();
        match self.find_refuge(&handle, name) {
            Ok(refuge) => match self.services.jobs.evict(handle, limit, &refuge) {
                Ok(true) => {
                    let refuge = refuge.to_string();
                    tracing::info!(
                        target: "audit", who = "this server", call = "evict", job = ?name.as_str(), outcome = "answered",
                        bytes, ?limit, refuge, "an idle job was evicted"
                    );
                    self.tries.remove(name);
                }
                // It was used meanwhile.
                Ok(false) => {}
                Err(fault) => tracing::warn!(job = %name, %fault, "files of an evicted job were not removed"),
            },
            Err(fault) => {
                // What passes by itself is no warning.
                if fault.kind != FaultKind::Unavailable && handle.idle.stays(&fault.to_string()) {
                    tracing::warn!(job = %name, %fault, "an idle job is not evicted");
                }
                let next = Instant::now() + (limit / 8).clamp(AGAIN.0, AGAIN.1);
                let written = self.tries.remove(name).and_then(|before| before.written);
                self.tries.insert(name.clone(), Try::of(&handle, next, written));
            }
        }
    }

    /// Sees to it that the state is safe elsewhere, and returns where.
    fn find_refuge(&mut self, handle: &Arc<JobHandle>, name: &JobName) -> Result<Refuge, Fault> {
        let job = &handle.job;
        job.check_alive()?;
        if job.progress().phase == Phase::Loading {
            return Ok(Refuge::Nowhere);
        }
        job.settle(Instant::now() + SETTLE)?;
        if self.services.jobs.keeps_on_drives(handle) {
            let (version, durable) = (job.progress().version, job.durable());
            if durable >= version {
                return Ok(Refuge::Drives);
            }
            let remedy = "see whether the drives of --state-dir still write";
            return Err(Fault::new(FaultKind::Precondition, "durable", durable, version, remedy));
        }
        let Written { name, version, .. } = self.checkpoint(handle, name)?;
        Ok(Refuge::Checkpoint { name, version })
    }

    /// A sealed checkpoint of the version that the job is at.
    fn checkpoint(&mut self, handle: &Arc<JobHandle>, name: &JobName) -> Result<Written, Fault> {
        let store = self.services.store()?;
        let job = &handle.job;
        check_keepable(job)?;
        let before = self.tries.remove(name).and_then(|before| before.written);
        let waits = before.is_some();
        let written = match before.filter(|written| written.version == job.progress().version) {
            Some(written) => written,
            None => unasked::write(&store, job, "idle", Instant::now() + SETTLE).inspect_err(|fault| {
                self.services.checkpoint_log.failed(name.as_str(), "idle", fault);
            })?,
        };
        if !unasked::seal(&store, job, &written, self.services.checkpoint_keep)? {
            let value = format!("a folder without the parts of all {} servers", written.servers);
            let remedy = "give the job's servers one folder that all of them share, and the same --idle-limit; until \
                          then its memory stays taken";
            // The others are about to write theirs, each when its own clock says so.
            let kind = if waits { FaultKind::Precondition } else { FaultKind::Unavailable };
            let fault = Fault::new(kind, "checkpoint_dir", value, "one with all of them", remedy);
            self.tries.insert(name.clone(), Try::of(handle, Instant::now(), Some(written)));
            return Err(fault);
        }
        self.services.checkpoint_log.sealed(name.as_str(), &written.name, written.version);
        Ok(written)
    }
}

/// Refuses a job of which a checkpoint would lose something.
fn check_keepable(job: &Job) -> Result<(), Fault> {
    let precondition =
        |field, value, limit, remedy| Fault::new(FaultKind::Precondition, field, value, limit, remedy);
    if job.has_standing() {
        let remedy = "let the next step be decided, or checkpoint the job and delete it by hand";
        return Err(precondition(
            "standing",
            "a pause or a resume",
            "none, which a checkpoint does not keep",
            remedy,
        ));
    }
    // Before the first decision nothing tells one filling's parts from another's.
    if job.progress().version == Version(0) && job.placement().servers.len() > 1 {
        let remedy = "let the first step be decided, or delete the job";
        return Err(precondition("version", "0, on several servers", "at least 1", remedy));
    }
    Ok(())
}
