//! Taking a rank: a new incarnation everywhere, and one version on all servers before the first step.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use futures_util::future::try_join_all;
use longshore_proto::{Commit, Incarnation, Origin, Rank, Step, Version};
use longshore_wire::{
    Wire,
    v1::{
        AwaitDurableRequest, CommitRequest, DescribeResponse, JobProgress, JoinRequest, LeaveRequest, Phase,
    },
};

use super::{Core, core::OwnCommit, retry::Backoff};
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
        let answers = self.describe_all(false, self.options.deadline).await?;
        let incarnation = self.next_incarnation(&answers);
        if self.options.rank == Rank(0) {
            self.take_over(incarnation).await?;
        }
        let join = |server| self.join_server(server, incarnation, false);
        let progress = try_join_all((0..self.peers.len()).map(join)).await?;
        self.set_incarnation(incarnation);
        for server in 0..self.peers.len() {
            self.relink(server).await.map_err(|fault| self.explain(server, "Link", None, fault))?;
        }
        let mut progress = self.align(progress).await?;
        if self.options.rank == Rank(0) {
            progress = self.spread_resume(progress).await?;
        }
        let first = &progress[0];
        self.set_joined_at(Version(first.version));
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
    fn next_incarnation(&self, answers: &[DescribeResponse]) -> Incarnation {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |now| now.as_micros() as u64);
        let mine =
            answers.iter().flat_map(|answer| &answer.ranks).filter(|rank| rank.rank == self.options.rank.0);
        let last = mine.map(|rank| rank.incarnation).max().unwrap_or(0);
        Incarnation(now.max(last.saturating_add(1)))
    }

    /// Takes the rank on one server, or only ends what earlier processes of it may do there.
    pub(super) async fn join_server(
        &self,
        server: usize,
        incarnation: Incarnation,
        fence_only: bool,
    ) -> Result<JobProgress> {
        let request = JoinRequest {
            job: self.job().to_string(),
            rank: self.options.rank.0,
            incarnation: incarnation.0,
            fence_only,
        };
        let answer = self.call(server, "Join", None, self.options.deadline, |peer| {
            let request = request.clone();
            async move { peer.training().join(request).await }
        });
        let answer = answer.await?;
        if !fence_only {
            self.links.offered(server, answer.memfd);
        }
        Ok(answer.progress.unwrap_or_default())
    }

    /// Waits until all servers hold one version: rank 0 may be joining, too, and completing a commit.
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
            if !backoff.pause(end).await {
                let versions = self.peers.iter().zip(&progress);
                let versions =
                    versions.map(|(peer, progress)| (peer.address.clone(), Version(progress.version)));
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

    /// Waits until no crash of a server can take the version back.
    pub(crate) async fn await_durable(&self, server: usize, version: Version) -> Result<()> {
        let request = AwaitDurableRequest {
            job: self.job().to_string(),
            version: version.0,
            deadline_ms: self.options.deadline.as_millis() as u64,
        };
        let step = Some(Step(version.0));
        let answer = self.call(server, "AwaitDurable", step, self.options.deadline, |peer| {
            let request = request.clone();
            async move { peer.training().await_durable(request).await }
        });
        answer.await.map(|_| ())
    }

    /// Sends one decision to one server.
    pub(crate) async fn commit(
        &self,
        server: usize,
        OwnCommit { commit, origins }: &OwnCommit,
    ) -> Result<()> {
        self.commit_as(server, self.incarnation(), commit, origins[server]).await
    }

    pub(super) async fn commit_as(
        &self,
        server: usize,
        incarnation: Incarnation,
        commit: &Commit,
        origin: Origin,
    ) -> Result<()> {
        let request = CommitRequest {
            job: self.job().to_string(),
            incarnation: incarnation.0,
            commit: Some(commit.to_wire()),
            origin: origin.0,
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
