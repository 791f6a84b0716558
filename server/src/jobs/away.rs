//! What a server knows of a job that it keeps, or gave back, and cannot serve now.

use std::{collections::BTreeMap, time::Instant};

use longshore_engine::{
    admission::Need,
    tier::{Storage, StoredJob},
};
use longshore_proto::{Fault, JobName};

use super::JobEntry;

/// How many jobs that are evicted to a checkpoint are known by name: with 1 KB each they take as much as one chunk. Each has a note beside
/// its checkpoint, so that one which is not known here any more is still refused other weights.
pub(crate) const MOST_REMEMBERED: usize = 1000;

pub(super) struct Away {
    /// Why it cannot be served: it is being recovered, that has failed, or it is evicted.
    pub(super) fault: Fault,
    /// None if its folder cannot be read, and for a job whose state is in a checkpoint.
    pub(super) kept: Option<Kept>,
    pub(super) evicted: Evicted,
    since: Instant,
}

/// A job in the state directories.
#[derive(Clone)]
pub(super) struct Kept {
    pub(super) stored: StoredJob,
    /// Bytes. They follow from the whole layout, so they are computed once, and not whenever somebody asks what its owner has.
    pub(super) drives: u64,
}

/// Whether a job idled and its memory was given back.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Evicted {
    No,
    /// By this process.
    Here,
    /// By an earlier process, perhaps another server's that shares the folder of checkpoints. What comes of it there later is learned
    /// by this server's next process; weights are judged by the note as it is when they come.
    Noted,
}

impl Kept {
    pub(super) fn new(stored: StoredJob, storage: &Storage) -> Kept {
        let need = stored.need(storage).unwrap_or_else(|_| Need::default());
        Kept { stored, drives: need.disk }
    }
}

impl JobEntry {
    pub(super) fn is_evicted(&self) -> bool {
        matches!(self, JobEntry::Away(away) if away.evicted != Evicted::No)
    }
}

impl Away {
    pub(super) fn entry(fault: Fault, kept: Option<Kept>, evicted: Evicted) -> JobEntry {
        JobEntry::Away(Box::new(Away { fault, kept, evicted, since: Instant::now() }))
    }

    fn is_in_a_checkpoint(&self) -> bool {
        self.evicted != Evicted::No && self.kept.is_none()
    }
}

/// Forgets the names of jobs in checkpoints that were evicted longest ago, beyond those that are remembered.
pub(super) fn forget_some(entries: &mut BTreeMap<JobName, JobEntry>, most: usize) {
    let since = |(name, entry): (&JobName, &JobEntry)| match entry {
        JobEntry::Away(away) if away.is_in_a_checkpoint() => Some((away.since, name.clone())),
        _ => None,
    };
    let mut known: Vec<_> = entries.iter().filter_map(since).collect();
    known.sort_unstable();
    for (_, name) in known.iter().take(known.len().saturating_sub(most)) {
        entries.remove(name);
    }
}

#[cfg(test)]
mod tests {
    use longshore_proto::FaultKind;

    use super::*;

    #[test]
    fn those_evicted_longest_ago_are_forgotten_and_no_others() {
        let fault = Fault::new(FaultKind::NotFound, "job", "evicted", "open", "restore it");
        let mut entries = BTreeMap::new();
        for (name, evicted) in
            [("d", Evicted::Noted), ("a", Evicted::Here), ("b", Evicted::No), ("c", Evicted::Here)]
        {
            let name = JobName::parse("job", name).unwrap();
            entries.insert(name, Away::entry(fault.clone(), None, evicted));
        }
        forget_some(&mut entries, 3);
        assert_eq!(entries.len(), 4);
        forget_some(&mut entries, 1);
        assert_eq!(entries.keys().map(JobName::as_str).collect::<Vec<_>>(), ["b", "c"]);
    }
}
