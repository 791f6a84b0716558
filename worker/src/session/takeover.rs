//! A new rank 0 brings all servers to one version, before it joins; and how a living one learns that it must do so, too.

use std::time::Duration;

use futures_util::future::{join_all, try_join_all};
use longshore_proto::{Commit, Fault, FaultKind, Incarnation, Origin, Step, TierKind, fault::ORIGIN};
use longshore_wire::{
    Wire,
    v1::{DescribeResponse, JobProgress, Phase, StepBackRequest},
};

use super::Core;
use crate::error::{Error, Outdated, Result};

/// Longest wait for one server's answer while another one is what is waited for.
const GLANCE: Duration = Duration::from_secs(1);

impl Core {
    /// Ends first what earlier processes of rank 0 may do, everywhere: the versions read after that change no more. Then the
    /// newest decision is completed where it is missing, or taken back where it is not.
    pub(super) async fn take_over(&self, incarnation: Incarnation) -> Result<()> {
        let fence = |server| self.join_server(server, incarnation, true);
        let progress = try_join_all((0..self.peers.len()).map(fence)).await?;
        match self.complete_commit(&progress, incarnation).await {
            // A server has lost the gradients with the decision, and the process that could send them again is gone.
            Err(Error::Call(failed))
                if failed.fault.kind == FaultKind::Precondition && self.spec().tier == TierKind::Nvme =>
            {
                self.withdraw(incarnation).await
            }
            other => other,
        }
    }

    /// Rank 0 may have died between its commits: the newest decision goes to the servers one version behind, which have the
    /// contributions that it was made from, or refuse it. A server further behind needs what nobody holds any more: the versions
    /// stay apart, and `align` reports that.
    async fn complete_commit(&self, progress: &[JobProgress], incarnation: Incarnation) -> Result<()> {
        let newest = progress.iter().map(|progress| progress.version).max().unwrap_or(0);
        let ahead = progress.iter().find(|progress| progress.version == newest);
        let commit = ahead.and_then(|progress| progress.last_commit.clone());
        let loading = progress.iter().any(|progress| progress.phase() == Phase::Loading);
        let (Some(commit), false) = (commit, loading) else { return Ok(()) };
        let commit = Commit::from_wire(Some(commit))?;
        let behind = progress.iter().enumerate().filter(|(_, progress)| progress.version + 1 == newest);
        let send = |server: usize| {
            tracing::info!(server = self.peers[server].address, step = newest, "completing a commit");
            // From whatever the server has: the origin went with the process that made the decision.
            self.commit_as(server, incarnation, &commit, Origin::UNKNOWN)
        };
        try_join_all(behind.map(|(server, _)| send(server))).await?;
        Ok(())
    }

    /// Takes the newest decision back on the servers that have it by now, where their tier keeps the version before.
    async fn withdraw(&self, incarnation: Incarnation) -> Result<()> {
        // Asked again: a commit that was completed a moment ago is taken back, too.
        let answers = self.describe_all(false, self.options.deadline).await?;
        let common = answers.iter().map(version).min().unwrap_or(0);
        let ahead = answers.iter().enumerate().filter(|(_, answer)| version(answer) > common);
        try_join_all(ahead.map(|(server, _)| self.step_back(server, common, incarnation))).await?;
        Ok(())
    }

    async fn step_back(&self, server: usize, version: u64, incarnation: Incarnation) -> Result<()> {
        let request = StepBackRequest { job: self.job().to_string(), incarnation: incarnation.0, version };
        // Slow: it reads all of its state.
        let answer = self.call(server, "StepBack", None, self.options.slow_deadline, |peer| {
            let request = request.clone();
            async move { peer.admin().step_back(request).await }
        });
        answer.await?;
        let server = &self.peers[server].address;
        tracing::info!(server, version, "stepped back to the newest version that all servers hold");
        Ok(())
    }

    /// Whether a step that `server` lacks can be made of the same contributions again: not once a rank has another process than
    /// when it was decided. Servers that do not answer at once are passed over.
    ///
    /// # Errors
    /// `Outdated` when it cannot: this rank 0 must take over as a new one would.
    pub(crate) async fn check_reproducible(&self, server: usize, step: Step) -> Result<()> {
        let answers =
            join_all((0..self.peers.len()).map(|server| self.describe(server, false, GLANCE))).await;
        let decided = answers.iter().flatten().filter(|answer| version(answer) >= step.0);
        let Some(newer) = decided
            .flat_map(|answer| &answer.ranks)
            .find(|rank| rank.incarnation != 0 && rank.joined_at >= step.0)
        else {
            return Ok(());
        };
        let value = format!("of a process of rank {} that joined after {step} was decided", newer.rank);
        let remedy = "the step is taken back and made again";
        let limit = "of the processes that the step was decided with";
        let fault = Fault::new(FaultKind::Conflict, ORIGIN, value, limit, remedy);
        Err(Outdated { server: self.peers[server].address.clone(), job: self.job().clone(), fault }.into())
    }
}

fn version(answer: &DescribeResponse) -> u64 {
    answer.progress.as_ref().map_or(0, |progress| progress.version)
}
