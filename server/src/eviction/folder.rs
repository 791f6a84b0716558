//! The thread that goes to the folder of checkpoints for evictions, one job at a time. Where the folder hangs, as one does whose file
//! server is gone, it hangs with it, and jobs that need no folder are evicted all the same.

use std::{
    io,
    sync::{
        Arc, Weak,
        mpsc::{self, Receiver, Sender},
    },
    thread,
    time::{Duration, Instant},
};

use longshore_engine::job::Job;
use longshore_proto::{Fault, FaultKind, JobName, Version};
use tokio::runtime::Handle;

use super::last::{self, SETTLE};
use crate::{
    jobs::{JobHandle, Refuge},
    service::Services,
    unasked::{self, Written},
};

/// After so long status says of a job, and the log once, that its checkpoint has no end. At 64 MiB/s, the slowest disk that a
/// checkpoint waits for, that is 37 GiB.
const LONG: Duration = Duration::from_secs(600);

/// A job that is to be evicted to a checkpoint.
pub(super) struct Wanted {
    pub(super) handle: Arc<JobHandle>,
    pub(super) name: JobName,
    pub(super) limit: Duration,
    /// A part that waited for those of other servers.
    pub(super) before: Option<Written>,
}

/// What became of it.
pub(super) struct Outcome {
    pub(super) name: JobName,
    pub(super) of: Weak<JobHandle>,
    pub(super) limit: Duration,
    /// Why the job stays. None: it went, or is used again.
    pub(super) stays: Option<Fault>,
    pub(super) written: Option<Written>,
}

enum Task {
    Evict(Wanted),
    Discard(JobName, Written),
}

pub(super) struct Folder {
    tasks: Sender<Task>,
    outcomes: Receiver<Outcome>,
    /// The job that the thread is at.
    at: Option<(JobName, Weak<JobHandle>, Instant)>,
}

impl Folder {
    /// Must be called inside a tokio runtime. The thread ends with this, and is left behind if it hangs.
    pub(super) fn new(services: Services) -> io::Result<Folder> {
        let (tasks, inbox) = mpsc::channel();
        let (done, outcomes) = mpsc::channel();
        let runtime = Handle::current();
        let work = move || {
            // The wait for a job's users needs it.
            let _entered = runtime.enter();
            for task in inbox {
                match task {
                    Task::Evict(wanted) => {
                        // Nobody looks any more where the server stops.
                        let _ = done.send(evict(&services, wanted));
                    }
                    Task::Discard(name, written) => discard(&services, &name, &written),
                }
            }
        };
        thread::Builder::new().name("evict".into()).spawn(work)?;
        Ok(Folder { tasks, outcomes, at: None })
    }

    pub(super) fn is_at(&self, name: &JobName) -> bool {
        self.at.as_ref().is_some_and(|(at, ..)| at == name)
    }

    pub(super) fn is_busy(&self) -> bool {
        self.at.is_some()
    }

    /// Only where it is not busy.
    pub(super) fn begin(&mut self, wanted: Wanted) {
        let at = (wanted.name.clone(), Arc::downgrade(&wanted.handle), Instant::now());
        // Without the thread, which a defect has ended, jobs stay.
        self.at = self.tasks.send(Task::Evict(wanted)).is_ok().then_some(at);
    }

    /// Has a part removed that is not needed, when its turn comes.
    pub(super) fn discard(&self, name: JobName, written: Written) {
        let _ = self.tasks.send(Task::Discard(name, written));
    }

    pub(super) fn outcome(&mut self) -> Option<Outcome> {
        let outcome = self.outcomes.try_recv().ok();
        if outcome.is_some() {
            self.at = None;
        }
        outcome
    }

    /// Says of the job that the thread is at, if that takes long.
    pub(super) fn complain(&self) {
        let Some((name, of, _)) = self.at.as_ref().filter(|(.., since)| since.elapsed() > LONG) else {
            return;
        };
        let why = "its checkpoint has no end: see whether the folder of --checkpoint-dir answers";
        if of.upgrade().is_some_and(|handle| handle.idle.stays(why)) {
            tracing::warn!(job = %name, waited = ?LONG, "an idle job is not evicted: {why}");
        }
    }

    /// Says of a job whose turn comes later what it waits for, if that takes long.
    pub(super) fn put_off(&self, handle: &JobHandle) {
        if let Some((name, ..)) = self.at.as_ref().filter(|(.., since)| since.elapsed() > LONG) {
            handle.idle.stays(&format!("it waits for the end of the checkpoint of {name}"));
        }
    }
}

fn evict(services: &Services, wanted: Wanted) -> Outcome {
    let Wanted { handle, name, limit, before } = wanted;
    let of = Arc::downgrade(&handle);
    let mut written = before;
    let own_copy = handle.idle.own_copy();
    let refuge = find_refuge(services, &handle, &name, &mut written);
    drop(own_copy);
    let refuge = refuge.and_then(|refuge| services.jobs.note(&handle, &refuge).map(|()| refuge));
    let stays = match refuge {
        Ok(refuge) => {
            last::evict(services, handle, limit, &refuge);
            None
        }
        Err(fault) => Some(fault),
    };
    Outcome { name, of, limit, stays, written }
}

/// A sealed checkpoint of the version that the job is at. `written` is a part of it that is not sealed yet.
fn find_refuge(
    services: &Services,
    handle: &Arc<JobHandle>,
    name: &JobName,
    written: &mut Option<Written>,
) -> Result<Refuge, Fault> {
    let (store, job) = (services.store()?, &handle.job);
    job.settle(Instant::now() + SETTLE)?;
    check_keepable(job)?;
    let before = written.take();
    let waits = before.is_some();
    let part = match before.filter(|part| part.version == job.progress().version) {
        Some(part) => part,
        None => unasked::write(&store, job, "idle", Instant::now() + SETTLE).inspect_err(|fault| {
            services.checkpoint_log.failed(name.as_str(), "idle", fault);
        })?,
    };
    if !unasked::seal(&store, job, &part, services.checkpoint_keep)? {
        let value = format!("a folder without the parts of all {} servers", part.servers);
        let remedy = "give the job's servers one folder that all of them share, and the same --idle-limit; until \
                      then its memory stays taken";
        // The others are about to write theirs, each when its own clock says so.
        let kind = if waits { FaultKind::Precondition } else { FaultKind::Unavailable };
        *written = Some(part);
        return Err(Fault::new(kind, "checkpoint_dir", value, "one with all of them", remedy));
    }
    services.checkpoint_log.sealed(name.as_str(), &part.name, part.version);
    Ok(Refuge::Checkpoint { name: part.name, version: part.version })
}

fn discard(services: &Services, name: &JobName, written: &Written) {
    let Some(store) = &services.checkpoints else { return };
    if let Err(fault) = store.discard(name, &written.name, written.server, written.servers) {
        tracing::warn!(job = %name, %fault, "a part that is not needed was not removed");
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
