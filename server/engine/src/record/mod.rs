//! The record of a decided version and of the processes that have joined. Steps, tiers and checkpoints share it.

pub(crate) mod exact;
pub(crate) mod retired;

use longshore_proto::{Commit, Incarnation, LeftOut, Version};

/// A decided version, as a tier keeps it.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    pub version: Version,
    /// The number of steps that updated: Adam's t.
    pub applied: u64,
    /// The commit that decided it. None at version 0.
    pub commit: Option<Commit>,
    /// Parameters whose state fewer updates made than `applied`. Present at version 0, where no commit has
    /// the list.
    pub left_out: Vec<LeftOut>,
    /// Standing, if the job was paused or resumed since the version was decided.
    pub standing: Option<Standing>,
}

impl Record {
    /// Returns the record of a version that was just reached.
    pub fn new(version: Version, applied: u64, commit: Option<Commit>) -> Record {
        Record { version, applied, commit, left_out: Vec::new(), standing: None }
    }

    /// The record of a job that goes on from state, before its first step.
    pub fn filled(applied: u64, left_out: Vec<LeftOut>) -> Record {
        Record { left_out, ..Record::new(Version(0), applied, None) }
    }

    /// Returns true if the step that made the version left the state unchanged.
    pub fn is_skipped(&self) -> bool {
        self.commit.as_ref().is_some_and(|commit| commit.skip)
    }
}

/// The last pause or resume since a version was decided. Without a standing, the commit's pause holds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Standing {
    /// Why the job is paused; None once it was resumed.
    pub paused: Option<String>,
    /// The loss scale that an operator chose with the resume, for steps that read this version.
    pub loss_scale: Option<f64>,
}

/// A rank's process that has joined, as a tier keeps it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Joined {
    pub incarnation: Incarnation,
    /// The job's version at that time.
    pub at: Version,
    /// The process has only fenced an earlier one.
    pub fence_only: bool,
}
