//! Who owns the jobs of this server, what they take, and whether an owner may have more.

use std::{collections::BTreeMap, time::Duration};

use longshore_engine::{admission::Need, tier::StoredJob};
use longshore_proto::Fault;

use super::{JobEntry, JobHandle, Jobs};
use crate::{
    config::IdleLimit,
    terms::{Listed, Quota, Terms, Usage},
};

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
        let held = self.lock().get(&wanted.spec.name).map_or_else(Usage::default, |entry| self.usage(entry));
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
                *usages.entry(owner.to_string()).or_default() += self.usage(entry);
            }
        }
        usages
    }

    /// What a job takes. One that is away takes no memory, and its place on the drives.
    fn usage(&self, entry: &JobEntry) -> Usage {
        match entry {
            JobEntry::Open(handle) => {
                Usage { jobs: 1, memory: handle.job.memory_bytes(), drives: handle.job.disk_bytes() }
            }
            JobEntry::Away(away) => match &away.stored {
                Some(stored) => {
                    let need = stored.need(&self.storage).unwrap_or_else(|_| Need::default());
                    Usage { jobs: 1, memory: 0, drives: need.disk }
                }
                None => Usage::default(),
            },
        }
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

    /// After how long without use the job is evicted. None: never.
    pub(crate) fn idle_limit(&self, handle: &JobHandle) -> Option<Duration> {
        match self.terms(handle.owner.as_deref()).idle_limit.unwrap_or(self.idle_limit) {
            IdleLimit::Never => None,
            IdleLimit::After(limit) => Some(limit),
        }
    }
}

impl JobEntry {
    fn owner(&self) -> Option<&str> {
        match self {
            JobEntry::Open(handle) => handle.owner.as_deref(),
            JobEntry::Away(away) => away.stored.as_ref()?.owner.as_deref(),
        }
    }
}
