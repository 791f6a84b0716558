//! The jobs of this server: opened by workers, recovered from state directories, deleted. All gRPC calls and the thread
//! `recover` use them. Acts that touch memory or files run on blocking threads.

mod computing;
mod counters;
mod ending;
mod fetching;
mod handle;
mod hashing;
mod history;
mod idle;
mod owned;
mod ranks;
mod restores;
mod stages;
mod turns;
mod waits;

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use longshore_engine::{
    admission::{Budget, Need},
    job::{Compute, Job, room},
    step::Phase,
    tier::{Storage, StoredJob, finish_interrupted, stored_jobs},
};
use longshore_proto::{
    Epoch, Fault, FaultKind, Incarnation, JobName, JobSpec, Placement, Rank, ServerId,
    fault::{DELETED, MOVED},
    limits::DEFAULT_DEADLINE_MS,
};

use self::turns::Turn;
pub(crate) use self::{
    counters::RANKS,
    ending::StepBack,
    fetching::{Fetching, check_reached},
    handle::JobHandle,
    hashing::Hashes,
    history::Decided,
    restores::{Act, Stage},
    stages::StepStage,
    turns::Turns,
};
use crate::{
    lock::lock,
    quota::{Owners, Usage},
    tasks::blocking,
};

/// All jobs of a server.
pub(crate) struct Jobs {
    jobs: Mutex<BTreeMap<JobName, JobEntry>>,
    /// A job's turn is held while the job is created or reopened. Other jobs stay available: touching a large job's
    /// memory takes minutes.
    turns: Turns,
    /// Jobs that their owners' quotas have admitted, until they are listed as open.
    admitted: Mutex<BTreeMap<JobName, (String, Usage)>>,
    budget: Budget,
    storage: Storage,
    compute: Arc<Compute>,
    /// None if callers show no identity.
    owners: Option<Arc<dyn Owners>>,
    /// Set once this process has tried to open each job that it found stored at its start.
    has_recovered: AtomicBool,
    /// Set at shutdown. No job is opened afterwards.
    is_ending: AtomicBool,
    /// Jobs that were deleted here, or that this server has left, since the server's start. A job that the server has
    /// left comes with the addresses of the job's servers.
    gone: Mutex<BTreeMap<JobName, Option<String>>>,
    /// Held while the room for a job is computed, so one call at a time computes. A million shards take seconds, on
    /// threads that other calls need too.
    reckoning: Arc<tokio::sync::Mutex<()>>,
}

/// Largest number of names in [`Jobs::gone`], of 128 bytes each.
const GONE_KEPT: usize = 4096;

enum JobEntry {
    Open(Arc<JobHandle>),
    Away(Box<Away>),
}

/// A stored job that this server cannot serve now.
struct Away {
    /// Reason why the job is not served: recovery in progress, or failed.
    fault: Fault,
    /// None if the job's folder is unreadable.
    kept: Option<Kept>,
}

/// A job in the state directories.
#[derive(Clone)]
struct Kept {
    stored: StoredJob,
    /// Bytes on drives. Computed once from the whole layout, since each question about an owner's usage needs the
    /// number.
    drives: u64,
}

impl Kept {
    fn new(stored: StoredJob, storage: &Storage) -> Kept {
        let need = stored.need(storage).unwrap_or_else(|_| Need::default());
        Kept { stored, drives: need.disk }
    }
}

impl Away {
    fn entry(fault: Fault, kept: Option<Kept>) -> JobEntry {
        JobEntry::Away(Box::new(Away { fault, kept }))
    }
}

pub(crate) fn not_found(name: &str) -> Fault {
    Fault::new(
        FaultKind::NotFound,
        "job",
        format!("{name:?}"),
        "open on this server",
        "open it; a server with the memory tier forgets its jobs when it restarts: restore the last checkpoint",
    )
}

/// Fault of a job that this server has deleted. Ranks that trained it end with this reason.
fn deleted(name: &JobName) -> Fault {
    let remedy = "start all ranks again: they go on from what the servers have then, or begin anew";
    Fault::new(FaultKind::NotFound, "job", format!("{:?}", name.as_str()), DELETED, remedy)
}

/// Fault of a job in recovery. Workers repeat their call.
fn recovering(name: &JobName) -> Fault {
    let remedy = "wait: its state is read and checked first";
    Fault::new(FaultKind::Unavailable, "job", format!("{name}, being recovered"), "open", remedy)
}

impl Jobs {
    /// Creates the table, with an away entry for each stored job. `recover` opens the returned jobs.
    pub(crate) fn new(
        budget: Budget,
        storage: Storage,
        compute: Arc<Compute>,
        owners: Option<Arc<dyn Owners>>,
    ) -> (Jobs, Vec<StoredJob>) {
        let dirs = storage.folders();
        finish_interrupted(&dirs);
        let stored = stored_jobs(&dirs);
        let mut jobs = BTreeMap::new();
        for job in &stored.jobs {
            let name = job.spec.name.clone();
            let kept = Kept::new(job.clone(), &storage);
            jobs.insert(name.clone(), Away::entry(recovering(&name), Some(kept)));
        }
        for (name, fault) in stored.unreadable {
            tracing::error!(job = %name, %fault, "not a job that can be opened");
            jobs.insert(name, Away::entry(fault, None));
        }
        let jobs = Jobs {
            jobs: Mutex::new(jobs),
            turns: Turns::default(),
            admitted: Mutex::default(),
            budget,
            storage,
            compute,
            owners,
            has_recovered: AtomicBool::new(false),
            is_ending: AtomicBool::new(false),
            gone: Mutex::default(),
            reckoning: Arc::default(),
        };
        (jobs, stored.jobs)
    }

    /// Opens the stored jobs. Blocks while their state is read.
    pub(crate) fn recover(&self, stored: Vec<StoredJob>) {
        for job in stored {
            let name = job.spec.name.clone();
            let _turn = self.turns.wait(&name);
            if let Ok(open) = self.get(name.as_str()) {
                // A worker may have opened the job while other jobs were recovered.
                if check_same(&open.stored(), &job).is_err() {
                    tracing::error!(job = %name, "kept twice, for different servers or numbers of them: one is left alone");
                }
                continue;
            }
            match self.start(job, &self.storage) {
                Ok(handle) => {
                    let version = handle.job.progress().version;
                    tracing::info!(job = %name, %version, bytes = handle.job.memory_bytes(), "job recovered");
                }
                Err(fault) => tracing::error!(job = %name, %fault, "not recovered"),
            }
        }
        self.has_recovered.store(true, Ordering::Release);
    }

    /// Returns whether this process has tried to open each job that it found stored at its start.
    pub(crate) fn has_recovered(&self) -> bool {
        self.has_recovered.load(Ordering::Acquire)
    }

    /// Opens a job, and stores the open job or its fault under the name.
    fn start(&self, job: StoredJob, storage: &Storage) -> Result<Arc<JobHandle>, Fault> {
        let name = job.spec.name.clone();
        if self.is_ending.load(Ordering::Relaxed) {
            return Err(Fault::new(
                FaultKind::Unavailable,
                "job",
                name,
                "open",
                "the server stops: start it again",
            ));
        }
        let storage = Storage { owner: job.owner.clone(), ..storage.clone() };
        let compute = Arc::new(self.compute.for_job());
        let started = JobHandle::start(job.clone(), &self.budget, &storage, compute);
        let started = started.map(Arc::new);
        match &started {
            Ok(handle) => {
                // A job that had moved away is back, also once it can no longer be served.
                lock(&self.gone).remove(&name);
                lock(&self.jobs).insert(name, JobEntry::Open(Arc::clone(handle)));
            }
            Err(fault) => {
                // A job without stored state leaves no entry.
                let is_stored = || stored_jobs(&self.storage.folders()).jobs.contains(&job);
                if lock(&self.jobs).contains_key(&name) || is_stored() {
                    let kept = Kept::new(job, &self.storage);
                    lock(&self.jobs).insert(name, Away::entry(fault.clone(), Some(kept)));
                }
            }
        }
        started
    }

    pub(crate) fn budget(&self) -> &Budget {
        &self.budget
    }

    pub(crate) fn get(&self, name: &str) -> Result<Arc<JobHandle>, Fault> {
        let name = JobName::parse("job", name)?;
        match lock(&self.jobs).get(&name) {
            Some(JobEntry::Open(handle)) => Ok(Arc::clone(handle)),
            Some(JobEntry::Away(away)) => Err(away.fault.clone()),
            None => Err(self.absent(&name)),
        }
    }

    /// Returns the fault of a job without an entry.
    fn absent(&self, name: &JobName) -> Fault {
        match lock(&self.gone).get(name) {
            None => not_found(name.as_str()),
            Some(None) => deleted(name),
            Some(Some(servers)) => {
                let remedy = format!("name one of {servers}, {MOVED}");
                Fault { remedy, ..deleted(name) }
            }
        }
    }

    /// Refuses a job that this server has left. A trainer that still names this server would begin the job anew.
    fn check_not_moved(&self, name: &JobName) -> Result<(), Fault> {
        let gone = lock(&self.gone);
        let Some(Some(servers)) = gone.get(name) else { return Ok(()) };
        let remedy = format!(
            "start the trainer with --servers {servers}; or, for a new job of that name here, call `longshore delete --job={name}` \
             with this server alone first"
        );
        let limit = format!("on {servers}, to which it has moved");
        Err(Fault::new(FaultKind::Precondition, "servers", format!("{name} on this server"), limit, remedy))
    }

    /// Gives up a job that this server has left.
    pub(crate) async fn retire(
        self: Arc<Self>,
        handle: Arc<JobHandle>,
        placement: &Placement,
    ) -> Result<(), Fault> {
        let name = handle.job.spec().name.clone();
        drop(handle);
        let servers = placement.addresses().collect::<Vec<_>>().join(",");
        Arc::clone(&self).delete(name.as_str(), false).await?;
        tracing::info!(job = %name, servers, "this server has left the job");
        self.note_gone(&name, Some(servers));
        Ok(())
    }

    /// Ends the job here in an hour, unless this server has a part in it by then. A server has no part in a job that it
    /// has left. A new server gets its part from rank 0 or from a restore.
    pub(crate) fn end_unused(self: &Arc<Self>, handle: &Arc<JobHandle>) {
        /// Servers of one wish become ready at different times, since touching a terabyte takes minutes.
        const UNUSED: Duration = Duration::from_secs(3600);
        let (jobs, handle) = (Arc::clone(self), Arc::downgrade(handle));
        tokio::spawn(async move {
            tokio::time::sleep(UNUSED).await;
            let Some(handle) = handle.upgrade().filter(|handle| !handle.is_closed()) else { return };
            let (name, placement) = (handle.job.spec().name.clone(), handle.job.placement());
            let progress = handle.job.progress();
            let is_empty = progress.phase == Phase::Loading && progress.restoring.is_none();
            let is_member = placement.members().any(|member| member == handle.job.server());
            if is_member && !(handle.job.is_spare() && is_empty) {
                return;
            }
            if let Err(fault) = jobs.retire(handle, &placement).await {
                tracing::warn!(job = %name, %fault, "a job that this server has left stays behind");
            }
        });
    }

    /// Remembers a deletion, or a move to other servers, for ranks that call later.
    fn note_gone(&self, name: &JobName, moved_to: Option<String>) {
        let mut gone = lock(&self.gone);
        if gone.len() >= GONE_KEPT {
            gone.clear();
        }
        gone.insert(name.clone(), moved_to);
    }

    pub(crate) fn all(&self) -> Vec<Arc<JobHandle>> {
        let open = |entry: &JobEntry| {
            if let JobEntry::Open(handle) = entry { Some(Arc::clone(handle)) } else { None }
        };
        lock(&self.jobs).values().filter_map(open).collect()
    }

    /// Returns the stored jobs that are not open, with the reason.
    pub(crate) fn away(&self) -> Vec<(JobName, Fault)> {
        let away = |(name, entry): (&JobName, &JobEntry)| match entry {
            JobEntry::Away(away) => Some((name.clone(), away.fault.clone())),
            JobEntry::Open(_) => None,
        };
        lock(&self.jobs).iter().filter_map(away).collect()
    }

    pub(crate) fn names(&self) -> Vec<String> {
        lock(&self.jobs).keys().map(JobName::to_string).collect()
    }

    /// Returns whether this call created the job, and the job of this name. Waits while another call opens the job.
    /// `is_new` says that the server is no part of the job yet. A job that owns no shard here, or that has left this
    /// server, is then replaced. `incarnation` names rank 0's process, which fences earlier ones. For other callers it
    /// is 0.
    pub(crate) async fn open(
        self: Arc<Self>,
        wanted: StoredJob,
        is_new: bool,
        incarnation: Incarnation,
    ) -> Result<(bool, Arc<JobHandle>), Fault> {
        let turn = self.turns.take(&wanted.spec.name).await?;
        blocking(move || self.open_now(wanted, is_new, incarnation, &turn)).await
    }

    /// Opens the job as [`Jobs::open`] does. Blocks while memory is touched, and while a drive stores the fence.
    fn open_now(
        &self,
        wanted: StoredJob,
        is_new: bool,
        incarnation: Incarnation,
        turn: &Turn,
    ) -> Result<(bool, Arc<JobHandle>), Fault> {
        let fence = |handle: &JobHandle| {
            if incarnation == Incarnation::default() {
                return Ok(());
            }
            handle.job.protocol.fence(Rank(0), incarnation)?;
            handle.job.protocol.keep_joined()
        };
        // A fenced call must be refused first: it could replace the job that a newer process has prepared.
        if let Ok(handle) = self.get(wanted.spec.name.as_str()) {
            fence(&handle)?;
        }
        let (created, handle) = self.open_unfenced(wanted, is_new, turn)?;
        if created {
            fence(&handle)?;
        }
        Ok((created, handle))
    }

    fn open_unfenced(
        &self,
        wanted: StoredJob,
        is_new: bool,
        _: &Turn,
    ) -> Result<(bool, Arc<JobHandle>), Fault> {
        let Ok(handle) = self.get(wanted.spec.name.as_str()) else {
            if !is_new {
                self.check_not_moved(&wanted.spec.name)?;
            }
            let kept = self.kept(&wanted.spec.name)?;
            let epoch = wanted.placement.epoch;
            // Ranks name the newest placement. Stored state has the placement that the server was opened with.
            let placement = match &kept {
                Some(kept) if wanted.placement.epoch > kept.placement.epoch => kept.placement.clone(),
                _ => wanted.placement,
            };
            let mut wanted = StoredJob { placement, ..wanted };
            if let Some(kept) = &kept {
                wanted.spec = as_kept(wanted.spec, &kept.spec, epoch);
                check_same(kept, &wanted)
                    .map_err(|differs| self.kept_otherwise(differs, &wanted.spec.name))?;
                wanted.spec.clone_from(&kept.spec);
            }
            if kept.is_none() && !self.has_recovered() {
                self.leave_room(&wanted)?;
            }
            // A stored job keeps its owner.
            let owner = kept.as_ref().map_or(wanted.owner, |kept| kept.owner.clone());
            let wanted = StoredJob { owner, ..wanted };
            let _admitted = self.admit(&wanted)?;
            // A job whose recovery failed is retried: the disk may be back.
            return self.start(wanted, &self.storage).map(|handle| (true, handle));
        };
        let (placement, spec) = (handle.job.placement(), handle.job.spec());
        spec.same_as(&as_kept(wanted.spec.clone(), spec, placement.epoch.max(wanted.placement.epoch)))?;
        let wants = wanted.placement.held(wanted.server);
        let is_other = (handle.job.server(), spec.tier) != (wanted.server, wanted.spec.tier)
            || handle.job.opened() != wants;
        // A server may have stopped before it heard of its removal, or before the job was ended here.
        let newest = if wanted.placement.epoch > placement.epoch { &wanted.placement } else { &placement };
        let has_left = newest.servers.get(handle.job.server().0 as usize).is_some_and(String::is_empty);
        if is_new && (has_left || handle.job.is_spare() && is_other) {
            let wanted = StoredJob { owner: handle.owner.clone(), ..wanted };
            let _admitted = self.admit(&wanted)?;
            self.delete_open(&handle)?;
            return self.start(wanted, &self.storage).map(|handle| (true, handle));
        }
        if wanted.placement.epoch > placement.epoch {
            handle.job.make_room(&wants, |memory, drives| self.admit_more(&handle, memory, drives))?;
        }
        // Ranks name the newest placement that they know. Before the first change all ranks know the same placement.
        if wanted.placement.epoch == placement.epoch || wanted.placement.epoch == Epoch(1) {
            let same = placement.same_owners(&wanted.placement);
            same.map_err(|differs| self.way_to(&wanted.placement, &handle.job, differs))?;
        }
        check_server(handle.job.server(), wanted.server)?;
        Ok((false, handle))
    }

    /// Adds to a fault the command that moves a job to the servers that its trainer names.
    fn way_to(&self, wanted: &Placement, job: &Job, differs: Fault) -> Fault {
        let placement = job.placement();
        let [ours, theirs] = [&placement, wanted].map(|of| of.addresses().collect::<Vec<_>>().join(","));
        if wanted.servers.len() == placement.servers.len() {
            return differs;
        }
        let name = &job.spec().name;
        let remedy = format!(
            "start the trainer with --servers {ours}; while it trains, `longshore scale --servers {ours} --job={name} --to {theirs}` \
             moves the job"
        );
        Fault { remedy, ..differs }
    }

    /// Returns the number of a job's shards for which there is room, beside the shards that are here.
    pub(crate) async fn room(self: Arc<Self>, spec: JobSpec) -> Result<usize, Fault> {
        let layout = spec.validate()?;
        let turn = Arc::clone(&self.reckoning).lock_owned();
        let reckoning = tokio::time::timeout(Duration::from_millis(DEFAULT_DEADLINE_MS), turn).await;
        let reckoning = reckoning.map_err(|_| {
            let remedy = "other calls ask for room, too: try again later";
            Fault::new(FaultKind::Deadline, "shard_room", "not there", "there in time", remedy)
        })?;
        blocking(move || {
            let _reckoning = reckoning;
            let handle = match self.get(spec.name.as_str()) {
                Ok(handle) => Some(handle),
                Err(fault) if fault.kind == FaultKind::NotFound => None,
                Err(fault) => return Err(fault),
            };
            let kept = match handle {
                Some(handle) if !handle.job.is_spare() => return Ok(handle.job.room(&self.storage)),
                // Rank 0 opens a spare job anew, so the memory of the present one is free then.
                spare => spare.map_or(0, |handle| handle.job.memory_bytes()),
            };
            Ok(room(&spec, &layout, &self.storage, self.budget.free() + kept))
        })
        .await
    }

    /// Refuses a new job that would take the memory of stored jobs that are not recovered yet.
    fn leave_room(&self, wanted: &StoredJob) -> Result<(), Fault> {
        let awaited = |entry: &JobEntry| match entry {
            JobEntry::Away(away) => Some(away.kept.as_ref()?.stored.need(&self.storage).ok()?.total()),
            JobEntry::Open(_) => None,
        };
        let awaited: u64 = lock(&self.jobs).values().filter_map(awaited).sum();
        let (wants, free) =
            (wanted.need(&self.storage)?.total(), self.budget.total() - self.budget.reserved());
        if wants.saturating_add(awaited) <= free {
            return Ok(());
        }
        let limit = format!("within {} bytes until stored jobs are recovered", free.saturating_sub(awaited));
        let remedy = "wait: the server has just started, and its stored jobs come first";
        Err(Fault::new(FaultKind::Unavailable, "memory", format!("{wants} bytes"), limit, remedy))
    }

    /// Returns a stored job that is not open: its recovery has failed, or is not over.
    fn stored(&self, name: &str) -> Option<StoredJob> {
        match lock(&self.jobs).get(&JobName::parse("job", name).ok()?)? {
            JobEntry::Away(away) => away.kept.as_ref().map(|kept| kept.stored.clone()),
            JobEntry::Open(_) => None,
        }
    }

    /// Returns the job of this name in the state directories. An unreadable folder is read again: the disk may be back.
    ///
    /// # Errors
    /// If the folder is still unreadable: a new job must not hide stored state of the same name.
    fn kept(&self, name: &JobName) -> Result<Option<StoredJob>, Fault> {
        if let Some(stored) = self.stored(name.as_str()) {
            return Ok(Some(stored));
        }
        if !lock(&self.jobs).contains_key(name) {
            return Ok(None);
        }
        let found = stored_jobs(&self.storage.folders());
        match found.unreadable.into_iter().find(|(of, _)| of == name) {
            Some((_, fault)) => Err(unreadable(name, &fault)),
            None => Ok(found.jobs.into_iter().find(|job| job.spec.name == *name)),
        }
    }

    /// Returns the fault for opening a different job under the name of a stored job that is not open.
    fn kept_otherwise(&self, differs: Fault, name: &JobName) -> Fault {
        let why = match lock(&self.jobs).get(name) {
            Some(JobEntry::Away(away)) => away.fault.to_string(),
            _ => "it is read again".to_string(),
        };
        let remedy = format!(
            "run the job as it was opened; its state is kept here and is not open ({why}). To give it up, here and on its other \
             servers: `longshore delete --job={name} --discard-unreadable`"
        );
        Fault { remedy, ..differs }
    }
}

fn unreadable(name: &JobName, fault: &Fault) -> Fault {
    let value = format!("{name}, kept here and not readable ({fault})");
    let remedy = format!(
        "put that right first; or give up what is kept, here and on the job's other servers, with `longshore \
         delete --job={name} --discard-unreadable`"
    );
    Fault::new(FaultKind::Precondition, "job", value, "readable", remedy)
}

/// Returns the spec that a server compares with its own. A change of servers may have changed a job's tier. The tier
/// that its ranks name is then not compared.
fn as_kept(wanted: JobSpec, ours: &JobSpec, epoch: Epoch) -> JobSpec {
    let tier = if epoch > Epoch(1) { ours.tier } else { wanted.tier };
    JobSpec { tier, ..wanted }
}

/// Refuses a spec, placement or server index that differs from the job's.
fn check_same(job: &StoredJob, wanted: &StoredJob) -> Result<(), Fault> {
    job.spec.same_as(&wanted.spec)?;
    job.placement.same_owners(&wanted.placement)?;
    check_server(job.server, wanted.server)
}

fn check_server(server: ServerId, wanted: ServerId) -> Result<(), Fault> {
    if server == wanted {
        return Ok(());
    }
    let remedy = "name the same servers in the same order as when the job was opened";
    Err(Fault::new(FaultKind::Conflict, "server", wanted.0, server.0, remedy))
}

#[cfg(test)]
mod tests {
    use longshore_engine::kernels::Isa;
    use longshore_proto::{Epoch, JobSpec, Param, Placement, ServerId, ShardId, limits::BLOCK_ELEMENTS};

    use super::*;

    pub(super) fn wanted(name: &str, owner: Option<&str>) -> StoredJob {
        let name = JobName::parse("name", name).unwrap();
        let params = vec![Param { name: "a".into(), shape: vec![64], group: 0 }];
        let spec = JobSpec { shard_elements: BLOCK_ELEMENTS, ..JobSpec::new(name, params) };
        let placement = Placement::striped(vec!["here".into()], 1);
        StoredJob { spec, placement, server: ServerId(0), owner: owner.map(str::to_string) }
    }

    struct OneJob;

    impl Owners for OneJob {
        fn quota(&self, _: &str) -> crate::quota::Quota {
            crate::quota::Quota { jobs: Some(1), ..Default::default() }
        }

        fn list(&self) -> Vec<crate::quota::Listed> {
            Vec::new()
        }
    }

    pub(super) fn jobs() -> Arc<Jobs> {
        let compute = Arc::new(Compute::new(1, Isa::detect()).unwrap());
        let owners = Some(Arc::new(OneJob) as Arc<dyn Owners>);
        Arc::new(Jobs::new(Budget::new(1 << 28), Storage::default(), compute, owners).0)
    }

    #[tokio::test]
    async fn a_server_that_was_prepared_for_other_shards_begins_anew() {
        let jobs = jobs();
        let prepared = |owners: [u32; 2]| {
            let mut wanted = wanted("run", None);
            wanted.spec.params[0].shape = vec![2 * BLOCK_ELEMENTS];
            let servers = ["a", "b", "here"].map(str::to_string).to_vec();
            let owners = owners.map(ServerId).to_vec();
            wanted.placement = Placement { epoch: Epoch(2), owners, ..Placement::striped(servers, 2) };
            StoredJob { server: ServerId(2), ..wanted }
        };
        for (owners, is_anew) in [([0, 2], true), ([2, 0], true), ([2, 0], false)] {
            let (opened, handle) =
                Arc::clone(&jobs).open(prepared(owners), true, Incarnation(2)).await.unwrap();
            let shard = owners.iter().position(|&owner| owner == 2).unwrap() as u32;
            assert_eq!((opened, handle.job.opened()), (is_anew, vec![ShardId(shard)]));
        }
        let older = Arc::clone(&jobs).open(prepared([0, 2]), true, Incarnation(1)).await;
        assert_eq!(older.err().map(|fault| fault.kind), Some(FaultKind::Fenced));
    }

    #[tokio::test]
    async fn a_server_that_has_left_begins_anew() {
        let jobs = jobs();
        let first = wanted("run", None);
        let mut again = first.clone();
        again.placement.servers = ["", "there", "here"].map(str::to_string).to_vec();
        (again.placement.owners, again.placement.epoch) = (vec![ServerId(2)], Epoch(5));
        again.server = ServerId(2);
        Arc::clone(&jobs).open(first, false, Incarnation::default()).await.unwrap();
        let older = Arc::clone(&jobs).open(again.clone(), false, Incarnation(1)).await;
        assert_eq!(older.err().map(|fault| fault.kind), Some(FaultKind::Conflict));
        let (is_anew, handle) = Arc::clone(&jobs).open(again, true, Incarnation(1)).await.unwrap();
        assert_eq!((is_anew, handle.job.server()), (true, ServerId(2)));
    }

    #[tokio::test]
    async fn a_job_that_has_come_back_is_not_sent_to_where_it_had_moved() {
        let (jobs, wanted) = (jobs(), wanted("run", None));
        let name = &wanted.spec.name;
        let (_, handle) =
            Arc::clone(&jobs).open(wanted.clone(), false, Incarnation::default()).await.unwrap();
        let elsewhere = Placement::striped(vec!["there".into()], 1);
        Arc::clone(&jobs).retire(handle, &elsewhere).await.unwrap();
        assert!(jobs.check_not_moved(name).unwrap_err().limit.contains("there"));
        Arc::clone(&jobs).open(wanted.clone(), true, Incarnation(1)).await.unwrap();
        jobs.check_not_moved(name).unwrap();
    }

    #[tokio::test]
    async fn a_job_that_takes_long_holds_up_no_other() {
        let jobs = jobs();
        let stuck = jobs.turns.take(&JobName::parse("job", "a").unwrap()).await.unwrap();
        assert!(Arc::clone(&jobs).open(wanted("b", None), false, Incarnation::default()).await.unwrap().0);
        assert!(Arc::clone(&jobs).delete("b", false).await.is_ok());
        let waits = tokio::spawn(Arc::clone(&jobs).open(wanted("a", None), false, Incarnation::default()));
        tokio::task::yield_now().await;
        assert!(!waits.is_finished());
        drop(stuck);
        assert!(waits.await.unwrap().unwrap().0);
    }

    #[tokio::test]
    async fn jobs_that_are_opened_at_once_share_their_owners_quota() {
        let jobs = jobs();
        let admitted = jobs.admit(&wanted("a", Some("team"))).unwrap();
        let refused =
            Arc::clone(&jobs).open(wanted("b", Some("team")), false, Incarnation::default()).await.err();
        assert_eq!(refused.map(|fault| fault.field).as_deref(), Some("quota.jobs"));
        assert!(jobs.admit(&wanted("c", Some("others"))).is_ok());
        drop(admitted);
        assert!(
            Arc::clone(&jobs).open(wanted("b", Some("team")), false, Incarnation::default()).await.is_ok()
        );
    }
}
