//! A stored job that this server cannot serve now.

use longshore_engine::{
    admission::Need,
    tier::{Storage, StoredJob},
};
use longshore_proto::Fault;

use super::JobEntry;

pub(super) struct Away {
    /// Reason why the job is not served: recovery in progress, or failed.
    pub(super) fault: Fault,
    /// None if the job's folder is unreadable.
    pub(super) kept: Option<Kept>,
}

/// A job in the state directories.
#[derive(Clone)]
pub(super) struct Kept {
    pub(super) stored: StoredJob,
    /// Bytes on drives. Computed once from the whole layout, since each question about an owner's usage needs it.
    pub(super) drives: u64,
}

impl Kept {
    pub(super) fn new(stored: StoredJob, storage: &Storage) -> Kept {
        let need = stored.need(storage).unwrap_or_else(|_| Need::default());
        Kept { stored, drives: need.disk }
    }
}

impl Away {
    pub(super) fn entry(fault: Fault, kept: Option<Kept>) -> JobEntry {
        JobEntry::Away(Box::new(Away { fault, kept }))
    }
}
