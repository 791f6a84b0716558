//! Owners of jobs on this server: usage and quota checks.

use std::collections::BTreeMap;

use longshore_engine::tier::StoredJob;
use longshore_proto::{Fault, JobName};

use super::{JobEntry, JobHandle, Jobs};
use crate::{
    lock::lock,
    quota::{Listed, Quota, Usage},
};

impl Jobs {
    /// Refuses a job that would exceed its owner's quota. The job's present usage here is counted already. The job
    /// counts as admitted until the result is dropped, when the job is open or has failed to open.
    pub(super) fn admit(&self, wanted: &StoredJob) -> Result<Option<Admitted<'_>>, Fault> {
        let Some((owner, quota)) = self.limited(wanted.owner.as_deref()) else { return Ok(None) };
        let need = wanted.need(&self.storage)?;
        let held = lock(&self.jobs).get(&wanted.spec.name).map_or_else(Usage::default, JobEntry::usage);
        let wants = Usage {
            jobs: 1 - held.jobs,
            memory: need.total().saturating_sub(held.memory),
            drives: need.disk.saturating_sub(held.drives),
        };
        self.admit_usage(owner, quota, &wanted.spec.name, wants).map(Some)
    }

    /// Refuses bytes of memory and drives by which an open job would exceed its owner's quota.
    pub(super) fn admit_more(
        &self,
        handle: &JobHandle,
        memory: u64,
        drives: u64,
    ) -> Result<Option<Admitted<'_>>, Fault> {
        let Some((owner, quota)) = self.limited(handle.owner.as_deref()) else { return Ok(None) };
        let wants = Usage { jobs: 0, memory, drives };
        self.admit_usage(owner, quota, &handle.job.spec().name, wants).map(Some)
    }

    /// Returns an owner that has limits, and the limits.
    fn limited<'a>(&self, owner: Option<&'a str>) -> Option<(&'a str, Quota)> {
        let (owner, owners) = (owner?, self.owners.as_ref()?);
        Some((owner, owners.quota(owner))).filter(|(_, quota)| *quota != Quota::default())
    }

    fn admit_usage(
        &self,
        owner: &str,
        quota: Quota,
        name: &JobName,
        wants: Usage,
    ) -> Result<Admitted<'_>, Fault> {
        let mut admitted = lock(&self.admitted);
        let mut has = self.usages().remove(owner).unwrap_or_default();
        let open = |name| lock(&self.jobs).get(name).filter(|entry| entry.is_open()).map(JobEntry::usage);
        // `usages` counts a part of the bytes that an open job was admitted for.
        for (name, (_, usage)) in admitted.iter().filter(|(_, (of, _))| of == owner) {
            has += usage.beyond(open(name).unwrap_or_default());
        }
        quota.admit(owner, has, wants)?;
        // An open job may be replaced by the admitted one.
        let mut all = open(name).unwrap_or_default();
        all += wants;
        admitted.insert(name.clone(), (owner.to_string(), all));
        Ok(Admitted { jobs: self, name: name.clone() })
    }

    fn usages(&self) -> BTreeMap<String, Usage> {
        let mut usages = BTreeMap::<String, Usage>::new();
        for entry in lock(&self.jobs).values() {
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

/// A job that its owner's quota has admitted.
pub(super) struct Admitted<'a> {
    jobs: &'a Jobs,
    name: JobName,
}

impl Drop for Admitted<'_> {
    fn drop(&mut self) {
        lock(&self.jobs.admitted).remove(&self.name);
    }
}

impl JobEntry {
    fn is_open(&self) -> bool {
        matches!(self, JobEntry::Open(_))
    }

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
