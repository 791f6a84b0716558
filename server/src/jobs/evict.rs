//! What is left of a job whose memory was given back because it idled: a name, and where its state is.

use std::{
    sync::{Arc, PoisonError},
    time::Duration,
};

use longshore_engine::{
    job::Job,
    step::{Phase, Progress},
    tier::Durability,
};
use longshore_proto::{Fault, FaultKind, JobName, Lifetime, Version, fault::EVICTED};

use super::{Away, JobEntry, JobHandle, Jobs};

/// Where an evicted job's state is.
pub(crate) enum Refuge {
    /// In a checkpoint of the version.
    Checkpoint { name: String, version: Version },
    /// In this server's state directories, where it always was.
    Drives,
    /// Nowhere: the job had none yet.
    Nowhere,
}

impl Jobs {
    /// Whether the job's tier keeps the state where it takes no memory.
    pub(crate) fn keeps_on_drives(&self, handle: &JobHandle) -> bool {
        handle.job.spec().tier.properties().lifetime == Lifetime::Drive
            && self.storage.durability == Durability::EachVersion
    }

    /// Gives back the memory of a job that has still not been used for `idle`. Returns false where it has. Blocks until its
    /// other users have let go of it.
    ///
    /// # Errors
    /// Where files of its tier cannot be removed. The job is evicted all the same.
    pub(crate) fn evict(
        &self,
        handle: Arc<JobHandle>,
        idle: Duration,
        refuge: &Refuge,
    ) -> Result<bool, Fault> {
        let _opening = self.opening.lock().unwrap_or_else(PoisonError::into_inner);
        // From here on no step can begin or be decided, and nobody joins; then comes the last look.
        let mut stopped = handle.stop();
        let used = handle.idle.look(&handle.job) < idle;
        if used || handle.is_closed() || !refuge.has_state_of(&handle.job) {
            return Ok(false);
        }
        let name = handle.job.spec().name.clone();
        let (fault, stored) = match refuge {
            Refuge::Checkpoint { name: checkpoint, version } => {
                (in_checkpoint(&name, checkpoint, *version), None)
            }
            Refuge::Drives => (on_drives(&name), Some(handle.stored())),
            Refuge::Nowhere => match handle.awaits_restore.clone() {
                Some(fault) => (fault, None),
                None => (super::not_found(name.as_str()), None),
            },
        };
        // A job that had no state leaves nothing to come back to.
        {
            let mut entries = self.lock();
            // It may have been deleted meanwhile.
            if !matches!(entries.get(&name), Some(JobEntry::Open(open)) if Arc::ptr_eq(open, &handle)) {
                return Ok(false);
            }
            if fault.field == EVICTED {
                let away = Away { fault: fault.clone(), stored, evicted: true };
                entries.insert(name, JobEntry::Away(Box::new(away)));
            } else {
                entries.remove(&name);
            }
        }
        *stopped = true;
        drop(stopped);
        handle.close(fault);
        let removed = if matches!(refuge, Refuge::Drives) { Ok(()) } else { handle.job.discard() };
        super::let_go(handle);
        removed.map(|()| true)
    }
}

fn in_checkpoint(job: &JobName, checkpoint: &str, version: Version) -> Fault {
    let value = format!("{job}, evicted at {version} because nobody used it");
    let limit = format!("open on this server; checkpoint {checkpoint} has its state");
    let remedy = format!(
        "go on from the checkpoint: run it with --resume, or `longshore restore --job {job} --name {checkpoint}`; or start \
         anew after `longshore delete --job {job}`"
    );
    Fault::new(FaultKind::NotFound, EVICTED, value, limit, remedy)
}

fn on_drives(job: &JobName) -> Fault {
    let value = format!("{job}, evicted because nobody used it");
    let limit = "open on this server; its state is on this server's drives";
    let remedy = "run its worker again, which opens the job where it was";
    Fault::new(FaultKind::Precondition, EVICTED, value, limit, remedy)
}

impl Refuge {
    /// Whether nothing of the job's state is missing there. A job may have been trained and have idled once more while its
    /// checkpoint was written.
    fn has_state_of(&self, job: &Job) -> bool {
        let Progress { version, phase, .. } = job.progress();
        match self {
            Refuge::Checkpoint { version: kept, .. } => *kept == version && !job.has_standing(),
            Refuge::Drives => job.durable() >= version,
            Refuge::Nowhere => phase == Phase::Loading,
        }
    }
}

impl std::fmt::Display for Refuge {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Refuge::Checkpoint { name, version } => write!(f, "checkpoint {name} of {version}"),
            Refuge::Drives => f.write_str("the drives of --state-dir"),
            Refuge::Nowhere => f.write_str("none: it had no weights"),
        }
    }
}
