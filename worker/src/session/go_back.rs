//! Back to a checkpoint, where servers have nothing of the job, or where what they have is to be given up. Nothing is deleted
//! before a checkpoint is known that every server can read, and nothing that would survive a restart without a word for it.

use std::time::Instant;

use futures_util::future::try_join_all;
use longshore_proto::{FaultKind, JobName, TierKind, Version};
use longshore_wire::v1::{JobProgress, Phase};

use super::{Checkpoint, Core, retry::Backoff};
use crate::error::{Error, NoCheckpoint, Result, StateKept};

/// To which checkpoint, and what may be given up for it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GoBack {
    /// None: the newest that can be restored, with a warning for each newer one that cannot.
    pub checkpoint: Option<String>,
    /// State that servers hold may be deleted. Without it only what the `memory` tier has after another server lost its
    /// part.
    pub discard_state: bool,
}

/// Where the job's state is.
struct Whereabouts {
    /// By server; None where the job is not open.
    progress: Vec<Option<JobProgress>>,
}

impl Whereabouts {
    fn has_state(progress: &Option<JobProgress>) -> bool {
        progress.as_ref().is_some_and(|progress| progress.phase() != Phase::Loading)
    }

    fn holders(&self) -> Vec<usize> {
        (0..self.progress.len()).filter(|&server| Self::has_state(&self.progress[server])).collect()
    }

    fn is_whole(&self) -> bool {
        self.progress.iter().all(Self::has_state)
    }

    fn version(&self, server: usize) -> Version {
        Version(self.progress[server].as_ref().map_or(0, |progress| progress.version))
    }
}

impl Core {
    pub(super) async fn go_back(&self, how: &GoBack) -> Result<Checkpoint> {
        let all = try_join_all((0..self.peers.len()).map(|server| self.find(server))).await?;
        let there = Whereabouts { progress: all };
        let names = match &how.checkpoint {
            Some(name) => vec![JobName::parse("checkpoint.name", name)?.to_string()],
            None => self.names_newest_first().await?,
        };
        let mut newest = None;
        for (index, name) in names.iter().enumerate() {
            match self.go_back_to(name, &there, how.discard_state).await {
                Err(error) if how.checkpoint.is_none() && is_unreadable(&error) => {
                    if let Some(older) = names.get(index + 1) {
                        tracing::warn!(
                            checkpoint = name, %error, trying = older,
                            "A CHECKPOINT CANNOT BE RESTORED: going back to an older one, which loses the steps between"
                        );
                    }
                    newest.get_or_insert(error);
                }
                other => return other,
            }
        }
        Err(newest.unwrap_or_else(|| {
            let (holders, lost) = self.holders_and_lost(&there);
            let lost = if holders.is_empty() { Vec::new() } else { lost };
            NoCheckpoint { job: self.job().clone(), tier: self.spec().tier, lost, holders }.into()
        }))
    }

    async fn go_back_to(&self, name: &str, there: &Whereabouts, discard: bool) -> Result<Checkpoint> {
        let known = self.check_checkpoint(name).await?;
        let version = Version(known.version);
        let checkpoint = Checkpoint { name: name.into(), version, shared: true, stale: false, damage: None };
        let holders = there.holders();
        // A restore that was cut off, or a part lost at the checkpoint's very version: nothing need be given up.
        if holders.iter().all(|&server| there.version(server) == checkpoint.version) {
            self.open_everywhere().await?;
            match self.restore(name).await {
                Err(error) if !holders.is_empty() && is_other_state(&error) => {}
                other => return other.map(|_| checkpoint),
            }
        }
        let gone = self.spec().tier == TierKind::Memory && !there.is_whole();
        if !gone && !discard {
            return Err(self.kept(&checkpoint, there));
        }
        self.open_everywhere().await?;
        self.verify_checkpoint(name).await?;
        for &server in &holders {
            let (server, version) = (&self.peers[server].address, there.version(server));
            tracing::info!(server, %version, "giving up a job's state for a checkpoint");
        }
        try_join_all(holders.iter().map(|&server| self.discard_on(server))).await?;
        self.open_again().await?;
        self.restore(name).await?;
        Ok(checkpoint)
    }

    /// Memory and folders of a job that was deleted are free once its last call has ended.
    async fn open_again(&self) -> Result<()> {
        let end = Instant::now() + self.options.deadline;
        let mut backoff = Backoff::new();
        loop {
            match self.open_everywhere().await {
                Err(Error::Call(failed))
                    if matches!(failed.fault.kind, FaultKind::Exhausted | FaultKind::Conflict) =>
                {
                    if !backoff.pause(end).await {
                        return Err(Error::Call(failed));
                    }
                }
                other => return other.map(|_| ()),
            }
        }
    }

    /// Deletes the job on one server. Gone is gone, also when the first answer was lost.
    async fn discard_on(&self, server: usize) -> Result<()> {
        match self.delete_job_on(server).await {
            Err(Error::Call(failed)) if failed.fault.kind == FaultKind::NotFound => Ok(()),
            other => other,
        }
    }

    fn kept(&self, checkpoint: &Checkpoint, there: &Whereabouts) -> Error {
        let (holders, lost) = self.holders_and_lost(there);
        StateKept {
            job: self.job().clone(),
            tier: self.spec().tier,
            checkpoint: checkpoint.name.clone(),
            version: checkpoint.version,
            holders,
            lost,
        }
        .into()
    }

    /// The servers that hold state and its version, and those that have nothing.
    fn holders_and_lost(&self, there: &Whereabouts) -> (Vec<(String, Version)>, Vec<String>) {
        let address = |server: usize| self.peers[server].address.clone();
        let holders = there.holders();
        let lost = (0..self.peers.len()).filter(|server| !holders.contains(server));
        let lost = lost.map(address).collect();
        (holders.into_iter().map(|server| (address(server), there.version(server))).collect(), lost)
    }

    /// Every checkpoint that any server lists: one that only some can read is not passed over in silence.
    /// The one sealed last first: after a job went back, versions do not say which is newer.
    async fn names_newest_first(&self) -> Result<Vec<String>> {
        let listed = self.list_checkpoints().await?;
        Ok(listed.into_iter().rev().map(|checkpoint| checkpoint.name).collect())
    }
}

/// Whether it is the checkpoint that is at fault, and an older one may be whole.
fn is_unreadable(error: &Error) -> bool {
    match error {
        Error::Call(failed) => {
            let fault = &failed.fault;
            fault.field == "checkpoint" && matches!(fault.kind, FaultKind::Corrupt | FaultKind::NotFound)
        }
        Error::NotRestored(failed) => is_unreadable(&failed.cause),
        Error::OtherCheckpoints(_) => true,
        _ => false,
    }
}

/// Whether a server has state, and other than the checkpoint's.
fn is_other_state(error: &Error) -> bool {
    match error {
        Error::Call(failed) => {
            failed.fault.kind == FaultKind::Precondition && failed.fault.field == "job.phase"
        }
        Error::NotRestored(failed) => is_other_state(&failed.cause),
        _ => false,
    }
}
