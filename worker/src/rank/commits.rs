//! Sends rank 0's decisions to servers, and keeps the newest for servers that restart without them. Called by the
//! pipeline's driver, and by a takeover.

use std::sync::{Arc, Mutex};

use longshore_proto::{Commit, Incarnation, Origin, ServerId, Step, Version};
use longshore_wire::{
    Wire,
    v1::{AwaitDurableRequest, CommitRequest, StepReport},
};

use crate::{
    cluster::{ByServer, Cluster},
    error::Result,
    lock,
};

/// A commit of this rank 0, and the origin of the contributions on each server that it was decided from.
#[derive(Debug)]
pub(crate) struct OwnCommit {
    pub(crate) commit: Commit,
    pub(crate) origins: ByServer<Origin>,
    /// The step's report, for charts.
    pub(crate) report: StepReport,
}

impl OwnCommit {
    /// Sends the commit to one server, as the process that decided it.
    pub(crate) async fn send(&self, cluster: &Cluster, server: ServerId) -> Result<()> {
        // A server that has just joined the job had no part in the statistics.
        let origin = self.origins.get(server).copied().unwrap_or(Origin::UNKNOWN);
        let told = (origin, Some(self.report.clone()));
        commit_as(cluster, server, self.commit.decided_by, &self.commit, told).await
    }
}

/// The newest commits of this rank 0.
#[derive(Default)]
pub(crate) struct OwnCommits(Mutex<Vec<Arc<OwnCommit>>>);

impl OwnCommits {
    /// Keeps a commit, and forgets the oldest. Three are enough for a delayed step and an `nvme` server that came
    /// back one version behind.
    pub(crate) fn remember(&self, own: Arc<OwnCommit>) {
        const KEPT: usize = 3;
        let mut commits = lock(&self.0);
        if commits.iter().all(|known| known.commit.step != own.commit.step) {
            commits.push(own);
        }
        let surplus = commits.len().saturating_sub(KEPT);
        commits.drain(..surplus);
    }

    /// Returns the commits after `step`, oldest first.
    pub(crate) fn after(&self, step: Step) -> Vec<Arc<OwnCommit>> {
        lock(&self.0).iter().filter(|own| own.commit.step > step).cloned().collect()
    }
}

/// Sends a decision to one server.
pub(crate) async fn commit_as(
    cluster: &Cluster,
    server: ServerId,
    incarnation: Incarnation,
    commit: &Commit,
    (origin, report): (Origin, Option<StepReport>),
) -> Result<()> {
    let request = CommitRequest {
        job: cluster.job().to_string(),
        incarnation: incarnation.0,
        commit: Some(commit.to_wire()),
        origin: origin.0,
        report,
    };
    let answer = cluster.call(server, "Commit", Some(commit.step), cluster.options.deadline, |peer| {
        let request = request.clone();
        async move { peer.training().commit(request).await }
    });
    let duplicate = answer.await?.duplicate;
    tracing::trace!(server = cluster.address(server), step = commit.step.0, duplicate, "committed");
    Ok(())
}

/// Waits until no crash of a server can take the version back. The wait may last as long as writing all of the
/// state.
pub(crate) async fn await_durable(cluster: &Cluster, server: ServerId, version: Version) -> Result<()> {
    let request = AwaitDurableRequest {
        job: cluster.job().to_string(),
        version: version.0,
        deadline_ms: cluster.options.slow_deadline.as_millis() as u64,
    };
    let step = Some(Step(version.0));
    let answer = cluster.call(server, "AwaitDurable", step, cluster.options.slow_deadline, |peer| {
        let request = request.clone();
        async move { peer.training().await_durable(request).await }
    });
    answer.await.map(|_| ())
}
