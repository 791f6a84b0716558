//! Idle jobs are evicted: their memory is given back once their state is safe elsewhere.
//!
//! Each server decides for itself, and never gives back the only copy of a version that others would need: a job in memory
//! goes only once a whole checkpoint of this very version is sealed in the folder that this server sees. So the
//! servers of a job must share that folder. A job on drives only gives up its memory, and is opened there again.
//! Whatever touches the folder is done by a thread of its own (`folder`), since the folder may hang.

mod folder;
mod last;

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

use longshore_engine::step::Phase;
use longshore_proto::{Fault, FaultKind, JobName};

use self::{
    folder::{Folder, Outcome, Wanted},
    last::{SETTLE, evict},
};
use crate::{
    jobs::{JobHandle, Refuge},
    service::Services,
    unasked::Written,
};

/// How often jobs are looked at.
const LOOK: Duration = Duration::from_secs(1);
/// After a failure the next try comes when the job has idled for so much of its limit again, within these bounds.
const AGAIN: (Duration, Duration) = (LOOK, Duration::from_secs(600));

/// Looks after jobs until it is dropped.
///
/// # Errors
/// Where the thread for the folder cannot be started.
pub(crate) fn watch(
    services: Services,
) -> io::Result<impl Future<Output = std::convert::Infallible> + Send + use<>> {
    let folder = Folder::new(services.clone())?;
    let mut eviction = Eviction { services, folder, tries: BTreeMap::new(), unlisted: BTreeSet::new() };
    Ok(async move {
        loop {
            tokio::time::sleep(LOOK).await;
            // The wait for a job's users blocks.
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
    })
}

struct Eviction {
    services: Services,
    folder: Folder,
    tries: BTreeMap<JobName, Try>,
    /// Owners of jobs who are on no list, and that was said.
    unlisted: BTreeSet<String>,
}

/// What was done so far to evict a job.
struct Try {
    /// Another job may have the name by now.
    of: Weak<JobHandle>,
    next: Instant,
    /// A part that waits for those of other servers.
    written: Option<Written>,
}

impl Eviction {
    fn look(&mut self) {
        if let Some(outcome) = self.folder.outcome() {
            self.learn(outcome);
        }
        self.folder.complain();
        let names = self.services.jobs.names();
        let gone = |name: &JobName| !names.iter().any(|known| known == name.as_str());
        let gone: Vec<_> = self.tries.keys().filter(|name| gone(name)).cloned().collect();
        gone.iter().for_each(|name| self.give_up(name));
        let mut unlisted = BTreeSet::new();
        // One at a time: whoever holds a job keeps others from closing it.
        for name in names {
            let Ok(handle) = self.services.jobs.get(&name) else { continue };
            self.services.jobs.weigh(&handle);
            unlisted.extend(self.services.jobs.unlisted_owner(&handle).map(str::to_string));
            let idle = handle.look();
            let limit = self.services.jobs.idle_limit(&handle);
            let name = handle.job.spec().name.clone();
            if self.folder.is_at(&name) {
                continue;
            }
            if self.tries.get(&name).is_some_and(|before| !std::ptr::eq(before.of.as_ptr(), &*handle)) {
                self.give_up(&name);
            }
            match limit.filter(|&limit| idle >= limit) {
                None => self.give_up(&name),
                Some(_) if self.services.draining.refuse().is_err() => {}
                Some(_) if self.tries.get(&name).is_some_and(|before| Instant::now() < before.next) => {}
                Some(limit) => self.try_to_evict(handle, name, limit),
            }
        }
        self.say_who_is_unlisted(unlisted);
    }

    /// An identity that was renamed still owns its jobs by its old name.
    fn say_who_is_unlisted(&mut self, now: BTreeSet<String>) {
        for owner in now.difference(&self.unlisted) {
            tracing::warn!(
                owner,
                "identities.toml does not list the owner of jobs here: they idle by --idle-limit from now on. To keep what it said of \
                 them, list that name again, without tokens if it is not to call"
            );
        }
        self.unlisted = now;
    }

    /// The job is used again, or gone: a part that nobody will seal takes no room.
    fn give_up(&mut self, name: &JobName) {
        if let Some(Try { written: Some(written), .. }) = self.tries.remove(name) {
            self.folder.discard(name.clone(), written);
        }
    }

    fn try_to_evict(&mut self, handle: Arc<JobHandle>, name: JobName, limit: Duration) {
        match self.refuge_without_folder(&handle) {
            Ok(Some(refuge)) => {
                evict(&self.services, handle, limit, &refuge);
            }
            // Its turn comes.
            Ok(None) if self.folder.is_busy() => self.folder.put_off(&handle),
            Ok(None) => {
                let before = self.tries.remove(&name).and_then(|before| before.written);
                self.folder.begin(Wanted { handle, name, limit, before });
            }
            Err(fault) => {
                let written = self.tries.remove(&name).and_then(|before| before.written);
                self.note_failure(&handle, name, (limit, written), &fault);
            }
        }
    }

    /// Where the state is safe without a checkpoint. None: nowhere.
    fn refuge_without_folder(&self, handle: &Arc<JobHandle>) -> Result<Option<Refuge>, Fault> {
        let job = &handle.job;
        job.check_alive()?;
        if job.progress().phase == Phase::Loading {
            return Ok(Some(Refuge::Nowhere));
        }
        if !self.services.jobs.keeps_on_drives(handle) {
            return Ok(None);
        }
        job.settle(Instant::now() + SETTLE)?;
        let (version, durable) = (job.progress().version, job.durable());
        if durable >= version {
            return Ok(Some(Refuge::Drives));
        }
        let remedy = "see whether the drives of --state-dir still write";
        Err(Fault::new(FaultKind::Precondition, "durable", durable, version, remedy))
    }

    fn learn(&mut self, outcome: Outcome) {
        let Outcome { name, of, limit, stays, written } = outcome;
        match (stays, of.upgrade()) {
            (Some(fault), Some(handle)) => self.note_failure(&handle, name, (limit, written), &fault),
            _ => written.into_iter().for_each(|written| self.folder.discard(name.clone(), written)),
        }
    }

    /// The job stays, and is tried again later.
    fn note_failure(
        &mut self,
        handle: &Arc<JobHandle>,
        name: JobName,
        (limit, written): (Duration, Option<Written>),
        fault: &Fault,
    ) {
        if fault.kind == FaultKind::Unavailable {
            // What passes by itself is no warning, until it does not pass.
            handle.idle.stays(&format!("not yet: {fault}"));
        } else if handle.idle.stays(&fault.to_string()) {
            tracing::warn!(job = %name, %fault, "an idle job is not evicted");
        }
        let next = Instant::now() + (limit / 8).clamp(AGAIN.0, AGAIN.1);
        self.tries.insert(name, Try { of: Arc::downgrade(handle), next, written });
    }
}
