//! A job that this server keeps and cannot serve now.

use longshore_engine::{
    admission::Need,
    tier::{Storage, StoredJob},
};
use longshore_proto::Fault;

use super::JobEntry;

pub(super) struct Away {
    /// Why the job cannot be served: it is being recovered, or that has failed.
    pub(super) fault: Fault,
    /// None if the job's folder cannot be read.
    pub(super) kept: Option<Kept>,
}

/// A job in the state directories.
#[derive(Clone)]
pub(super) struct Kept {
    pub(super) stored: StoredJob,
    /// Bytes. They follow from the whole layout, so they are computed once, and not at each question about an owner's usage.
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
