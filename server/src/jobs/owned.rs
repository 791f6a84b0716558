//! Who owns the jobs of this server, what they take, and whether an owner may have more.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use longshore_engine::{step::Phase, tier::StoredJob};
use longshore_proto::Fault;

use super::{JobEntry, JobHandle, Jobs};
use crate::{
    config::IdleLimit,
    terms::{Listed, Quota, Terms, Usage},
};

/// How long a job may wait for its weights at least, whatever its limit. The trainer that has opened it makes them meanwhile, and
/// asks the servers for nothing.
const FOR_WEIGHTS: Duration = Duration::from_secs(60);

impl Jobs {
    fn terms(&self, owner: Option<&str>) -> Terms {
        match (&self.owners, owner) {
            (Some(owners), Some(owner)) => owners.terms(owner),
            _ => Terms::default(),
        }
    }

    /// Refuses a job that would exceed its owner's quota. What is kept of it here counts already.
    pub(super) fn admit(&self, wanted: &StoredJob) -> Result<(), Fault> {
        let Some(owner) = &wanted.owner else { return Ok(()) };
        let quota = self.terms(Some(owner)).quota;
        if quota == Quota::default() {
            return Ok(());
        }
        let need = wanted.need(&self.storage)?;
        let held = self.lock().get(&wanted.spec.name).map_or_else(Usage::default, JobEntry::usage);
        let wants = Usage {
            jobs: 1 - held.jobs,
            memory: need.total(),
            drives: need.disk.saturating_sub(held.drives),
        };
        let has = self.usages().remove(owner).unwrap_or_default();
        quota.admit(owner, has, wants)
    }

    /// What the jobs of each owner take.
    fn usages(&self) -> BTreeMap<String, Usage> {
        let mut usages = BTreeMap::<String, Usage>::new();
        for entry in self.lock().values() {
            if let Some(owner) = entry.owner() {
                *usages.entry(owner.to_string()).or_default() += entry.usage();
            }
        }
        usages
    }

    /// All owners that are listed here or have jobs, by name, and what they have.
    pub(crate) fn owners(&self) -> Vec<(Listed, Usage)> {
        let mut usages = self.usages();
        let listed = self.owners.iter().flat_map(|owners| owners.list());
        let mut all: Vec<_> = listed
            .map(|listed| {
                let usage = usages.remove(&listed.name).unwrap_or_default();
                (listed, usage)
            })
            .collect();
        let gone = |(name, usage)| (Listed { name, quota: Quota::default(), connections: 0 }, usage);
        all.extend(usages.into_iter().map(gone));
        all.sort_by(|(a, _), (b, _)| a.name.cmp(&b.name));
        all
    }

    /// The job's weight beside others, for the update threads.
    pub(super) fn share(&self, owner: Option<&str>) -> u32 {
        self.terms(owner).share.unwrap_or(1)
    }

    /// Takes up the weight that the job's owner has now.
    pub(crate) fn weigh(&self, handle: &JobHandle) {
        handle.job.compute().set_share(self.share(handle.owner.as_deref()));
    }

    /// After how long without use the job is evicted. None: never. A job whose owner has left the list has as long as the server gives
    /// all jobs, from then on: nobody meant it to go in that moment.
    pub(crate) fn idle_limit(&self, handle: &JobHandle) -> Option<Duration> {
        match self.terms(handle.owner.as_deref()).idle_limit.unwrap_or(self.idle_limit) {
            IdleLimit::Never => None,
            IdleLimit::After(limit) => {
                let waits = limit < FOR_WEIGHTS && handle.job.progress().phase == Phase::Loading;
                let least = if waits { FOR_WEIGHTS } else { Duration::ZERO };
                Some(limit.max(least) + self.idle_while_listed(handle))
            }
        }
    }

    /// For how long the job had idled already when its owner left the list.
    fn idle_while_listed(&self, handle: &JobHandle) -> Duration {
        let unlisted = self.unlisted(handle).map(|since| handle.look().saturating_sub(since.elapsed()));
        unlisted.unwrap_or_default()
    }

    /// Since when the job's owner is not on the list. None: it is, or nobody keeps one.
    fn unlisted(&self, handle: &JobHandle) -> Option<Instant> {
        self.owners.as_ref()?.unlisted(handle.owner.as_deref()?)
    }

    /// The owner, if it is not on the list.
    pub(crate) fn unlisted_owner<'a>(&self, handle: &'a JobHandle) -> Option<&'a str> {
        self.unlisted(handle).and(handle.owner.as_deref())
    }
}

impl JobEntry {
    fn owner(&self) -> Option<&str> {
        match self {
            JobEntry::Open(handle) => handle.owner.as_deref(),
            JobEntry::Away(away) => away.kept.as_ref()?.stored.owner.as_deref(),
        }
    }

    /// What a job takes. One that is away takes no memory, and its place on the drives.
    fn usage(&self) -> Usage {
        match self {
            JobEntry::Open(handle) => {
                Usage { jobs: 1, memory: handle.job.memory_bytes(), drives: handle.job.disk_bytes() }
            }
            JobEntry::Away(away) => away
                .kept
                .as_ref()
                .map(|kept| Usage { jobs: 1, memory: 0, drives: kept.drives })
                .unwrap_or_default(),
        }
    }
}
