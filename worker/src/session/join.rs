//! Taking a rank: a new incarnation everywhere, and one version on all servers before the first step.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use futures_util::future::try_join_all;
use longshore_proto::{
    Commit, Incarnation, Rank, Step, Version,
    wire::v1::{CommitRequest, JobProgress, JoinRequest, LeaveRequest, Phase},
};

use super::{Core, retry::Backoff};
use crate::error::{Misuse, Result, VersionsDiffer};

/// Where the job stands as this rank takes part.
#[derive(Clone, Debug)]
pub struct Joined {
    pub incarnation: Incarnation,
    /// The same on all servers.
    pub version: Version,
    /// Steps that updated, up to `version`.
    pub applied: u64,
    /// The commit that made `version`: the loss scaler and the trainer's bytes are in its `trainer_state`. None at 0.
    pub last_commit: Option<Commit>,
    /// The reason, when the job is paused.
    pub paused: Option<String>,
}

impl Core {
    pub(super) async fn join(&self) -> Result<Joined> {
        if self.incarnation().0 != 0 {
            return Err(Misuse("the session has joined already: connect a new session to join again").into());
        }
        let incarnation = self.next_incarnation().await?;
        let join = |server| self.join_server(server, incarnation);
        let progress = try_join_all((0..self.peers.len()).map(join)).await?;
        self.set_incarnation(incarnation);
        let progress = self.align(progress).await?;
        let first = &progress[0];
        let last_commit = first.last_commit.clone();
        let paused = progress.iter().find(|progress| progress.phase() == Phase::Paused);
        Ok(Joined {
            incarnation,
            version: Version(first.version),
            applied: first.applied,
            last_commit: last_commit.map(|commit| Commit::from_wire(Some(commit))).transpose()?,
            paused: paused.map(|progress| progress.pause_reason.clone()),
        })
    }

    /// Above every earlier one even when this machine's clock went back.
    async fn next_incarnation(&self) -> Result<Incarnation> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |now| now.as_micros() as u64);
        let answers = self.describe_all(false, self.options.deadline).await?;
        let mine = answers.iter().flat_map(|answer| &answer.ranks).filter(|rank| rank.rank == self.options.rank.0);
        let last = mine.map(|rank| rank.incarnation).max().unwrap_or(0);
        Ok(Incarnation(now.max(last.saturating_add(1))))
    }

    pub(super) async fn join_server(&self, server: usize, incarnation: Incarnation) -> Result<JobProgress> {
        let request =
            JoinRequest { job: self.job().to_string(), rank: self.options.rank.0, incarnation: incarnation.0 };
        let answer = self.call(server, "Join", None, self.options.deadline, |peer| {
            let request = request.clone();
            async move { peer.training().join(request).await }
        });
        Ok(answer.await?.progress.unwrap_or_default())
    }

    /// Waits until all servers hold one version. They differ when rank 0 died between its commits: the new rank 0 sends
    /// the newest decision, which the servers ahead keep, to those behind.
    async fn align(&self, mut progress: Vec<JobProgress>) -> Result<Vec<JobProgress>> {
        let start = Instant::now();
        let end = start + self.options.deadline;
        let mut backoff = Backoff::new();
        loop {
            self.judge(&progress)?;
            let newest = progress.iter().map(|progress| progress.version).max().unwrap_or(0);
            if progress.iter().all(|progress| progress.version == newest) {
                return Ok(progress);
            }
            if self.options.rank == Rank(0) {
                self.pass_on(&progress, newest).await?;
            }
            if !backoff.pause(end).await {
                let versions = self.peers.iter().zip(&progress);
                let versions = versions.map(|(peer, progress)| (peer.address.clone(), Version(progress.version)));
                return Err(VersionsDiffer {
                    job: self.job().clone(),
                    versions: versions.collect(),
                    waited: start.elapsed(),
                }
                .into());
            }
            let answers = self.describe_all(false, self.options.deadline).await?;
            progress = answers.into_iter().map(|answer| answer.progress.unwrap_or_default()).collect();
        }
    }

    /// The newest decision to the servers one version behind it. One further behind needs what nobody holds any more;
    /// it keeps the versions apart, and the caller's deadline reports that.
    async fn pass_on(&self, progress: &[JobProgress], newest: u64) -> Result<()> {
        let ahead = progress.iter().find(|progress| progress.version == newest);
        let Some(commit) = ahead.and_then(|progress| progress.last_commit.clone()) else { return Ok(()) };
        let commit = Commit::from_wire(Some(commit))?;
        let behind = progress.iter().enumerate().filter(|(_, progress)| progress.version + 1 == newest);
        try_join_all(behind.map(|(server, _)| self.commit(server, &commit))).await?;
        Ok(())
    }

    /// Sends one decision to one server.
    pub(crate) async fn commit(&self, server: usize, commit: &Commit) -> Result<()> {
        let request = CommitRequest {
            job: self.job().to_string(),
            incarnation: self.incarnation().0,
            commit: Some(commit.to_wire()),
        };
        let step = Some(commit.step);
        let answer = self.call(server, "Commit", step, self.options.deadline, |peer| {
            let request = request.clone();
            async move { peer.training().commit(request).await }
        });
        let duplicate = answer.await?.duplicate;
        tracing::trace!(server = self.peers[server].address, step = commit.step.0, duplicate, "committed");
        Ok(())
    }

    pub(super) async fn leave(&self) -> Result<()> {
        let request = LeaveRequest {
            job: self.job().to_string(),
            rank: self.options.rank.0,
            incarnation: self.incarnation().0,
        };
        let leave = |server| {
            let request = &request;
            self.call(server, "Leave", None::<Step>, self.options.deadline, move |peer| {
                let request = request.clone();
                async move { peer.training().leave(request).await }
            })
        };
        try_join_all((0..self.peers.len()).map(leave)).await?;
        Ok(())
    }
}
