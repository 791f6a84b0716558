//! What is left of a job whose memory was given back because it idled: a name, and where its state is. A mark beside the
//! state says so to the next process.

use std::{
    sync::{Arc, PoisonError},
    time::Duration,
};

use longshore_engine::{
    checkpoint,
    job::Job,
    step::{Phase, Progress},
    tier::{Durability, StoredJob},
};
use longshore_proto::{Fault, FaultKind, JobName, Lifetime, Version, fault::EVICTED};

use super::{
    Away, Evicted, JobEntry, JobHandle, Jobs, Kept, MOST_REMEMBERED, away::forget_some, ending::let_go,
};

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

    /// Notes beside the checkpoint that the job is evicted to it, for this server's next process and for those who would begin the job
    /// anew. It comes before the eviction, and before any lock: the folder may hang.
    ///
    /// # Errors
    /// Where there is no such note now. Then the job must stay: a run after a restart would begin it anew.
    pub(crate) fn note(&self, handle: &JobHandle, refuge: &Refuge) -> Result<(), Fault> {
        match (refuge, &self.notes) {
            (Refuge::Checkpoint { name, version }, Some(notes)) => {
                let job = &handle.job.spec().name;
                // It may still be written, later, or be there although it could not be flushed.
                notes.write(job, name, *version).inspect_err(|_| notes.remove_later(job))
            }
            _ => Ok(()),
        }
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
        let stored = handle.stored();
        let evicted = self.evict_noted(handle, idle, refuge);
        if matches!((&evicted, refuge), (Ok(false), Refuge::Checkpoint { .. })) {
            self.forget_evicted(&stored.spec.name);
        }
        evicted
    }

    fn evict_noted(&self, handle: Arc<JobHandle>, idle: Duration, refuge: &Refuge) -> Result<bool, Fault> {
        let _opening = self.opening.lock().unwrap_or_else(PoisonError::into_inner);
        // From here on no step can begin or be decided, and nobody joins; then comes the last look.
        let Some(mut stopped) = handle.stop() else { return Ok(false) };
        if handle.look() < idle || handle.is_closed() || !refuge.has_state_of(&handle.job) {
            return Ok(false);
        }
        let name = handle.job.spec().name.clone();
        let (fault, kept) = match refuge {
            Refuge::Checkpoint { name: checkpoint, version } => {
                (in_checkpoint(&name, checkpoint, *version), None)
            }
            Refuge::Drives => {
                let kept = Kept { stored: handle.stored(), drives: handle.job.disk_bytes() };
                self.mark(&kept.stored);
                (on_drives(&name), Some(kept))
            }
            Refuge::Nowhere => {
                (handle.awaits_restore().unwrap_or_else(|| super::not_found(name.as_str())), None)
            }
        };
        // A job that had no state leaves nothing to come back to.
        {
            let mut entries = self.lock();
            // It may have been deleted meanwhile.
            if !matches!(entries.get(&name), Some(JobEntry::Open(open)) if Arc::ptr_eq(open, &handle)) {
                drop(entries);
                kept.iter().for_each(|kept| self.unmark(&kept.stored));
                return Ok(false);
            }
            if fault.field == EVICTED {
                entries.insert(name, Away::entry(fault.clone(), kept, Evicted::Here));
                forget_some(&mut entries, MOST_REMEMBERED);
            } else {
                entries.remove(&name);
            }
        }
        *stopped = true;
        drop(stopped);
        handle.close(fault);
        let removed = if matches!(refuge, Refuge::Drives) { Ok(()) } else { handle.job.discard() };
        let_go(handle);
        removed.map(|()| true)
    }

    /// Takes up the jobs that earlier processes evicted: those on this server's drives, and those with a note. One that is kept here
    /// besides has come back since.
    pub(super) fn take_up_evicted(&self, kept: Vec<StoredJob>, noted: Vec<(JobName, checkpoint::Evicted)>) {
        let kept = kept.into_iter().map(|job| {
            let name = job.spec.name.clone();
            (name.clone(), on_drives(&name), Some(Kept::new(job, &self.storage)))
        });
        let noted = noted.into_iter().map(|(name, note)| (name.clone(), in_note(&name, &note), None));
        let mut entries = self.lock();
        for (name, fault, kept) in kept.chain(noted) {
            entries.entry(name).or_insert_with(|| Away::entry(fault, kept, Evicted::Noted));
        }
    }

    /// Tells the next process. Where that fails it will know as much as after a crash, and opens the job on its drives again.
    fn mark(&self, job: &StoredJob) {
        if let Err(fault) = job.mark_evicted(&super::directories(&self.storage)) {
            tracing::warn!(job = %job.spec.name, %fault, "a restarted server will not know that the job is evicted");
        }
    }

    fn unmark(&self, job: &StoredJob) {
        if let Err(fault) = job.unmark_evicted(&super::directories(&self.storage)) {
            tracing::warn!(job = %job.spec.name, %fault, "the mark of an eviction is left");
        }
    }

    /// An evicted job on drives could not be opened.
    pub(super) fn mark_again(&self, job: &StoredJob) {
        self.mark(job);
    }

    /// What a job that this process evicted to a checkpoint is refused other weights with.
    pub(super) fn evicted_here(&self, job: &JobName) -> Option<Fault> {
        match self.lock().get(job) {
            Some(JobEntry::Away(away)) if away.kept.is_none() && away.evicted == Evicted::Here => {
                Some(away.fault.clone())
            }
            _ => None,
        }
    }

    /// Refuses weights that are not those of the checkpoint which has the job's state since it was evicted. The note counts,
    /// whatever this server knew of the job: it may have been opened for its checkpoint by a process that is gone. It is read when
    /// weights come, so that who opens a job whose state is here waits for no folder of checkpoints.
    ///
    /// # Errors
    /// `Unavailable` where the folder does not answer: nobody knows then.
    pub(crate) fn check_fillable(&self, handle: &JobHandle) -> Result<(), Fault> {
        if let Some(known) = handle.is_fillable() {
            return known;
        }
        let name = &handle.job.spec().name;
        let noted = self.notes.as_ref().map(|notes| notes.of(name)).transpose()?.flatten();
        handle.note_fillable(noted.map(|note| in_note(name, &note)))
    }

    /// Removes the note of a job that was found with its state after all: the process before ended between note and eviction. Where
    /// several servers have the job, another one may have given its part back.
    pub(super) fn forget_stale(&self, handle: &JobHandle) {
        let is_whole =
            handle.job.placement().servers.len() == 1 && handle.job.progress().phase != Phase::Loading;
        if let Some(notes) = self.notes.as_ref().filter(|_| is_whole) {
            notes.remove_later(&handle.job.spec().name);
        }
    }

    /// No checkpoint is the only place of this job's state any more: the job is there again, or deleted.
    pub(crate) fn forget_evicted(&self, job: &JobName) {
        if let Some(Err(fault)) = self.notes.as_ref().map(|notes| notes.remove(job)) {
            tracing::warn!(%job, %fault, "the note of an eviction is left");
        }
    }
}

fn in_note(job: &JobName, note: &checkpoint::Evicted) -> Fault {
    in_checkpoint(job, &note.checkpoint, Version(note.version))
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
