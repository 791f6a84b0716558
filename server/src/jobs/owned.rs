//! Owners of jobs on this server: usage and quota checks.

use std::collections::BTreeMap;

use longshore_engine::tier::StoredJob;
use longshore_proto::Fault;

use super::{JobEntry, Jobs};
use crate::quota::{Listed, Quota, Usage};

impl Jobs {
    /// Refuses a job that would exceed its owner's quota. Stored state of the job counts already.
    pub(super) fn admit(&self, wanted: &StoredJob) -> Result<(), Fault> {
        let Some(owner) = &wanted.owner else { return Ok(()) };
        let quota = self.owners.as_ref().map(|owners| owners.quota(owner)).unwrap_or_default();
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

    /// Returns the usage of each owner's jobs.
    fn usages(&self) -> BTreeMap<String, Usage> {
        let mut usages = BTreeMap::<String, Usage>::new();
        for entry in self.lock().values() {
            if let Some(owner) = entry.owner() {
                *usages.entry(owner.to_string()).or_default() += entry.usage();
            }
        }
        usages
    }

    /// Returns all owners that are listed or have jobs, by name, with their usage.
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
}

impl JobEntry {
    fn owner(&self) -> Option<&str> {
        match self {
            JobEntry::Open(handle) => handle.owner.as_deref(),
            JobEntry::Away(away) => away.kept.as_ref()?.stored.owner.as_deref(),
        }
    }

    /// Returns a job's usage. An away job takes space on drives and no memory.
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
