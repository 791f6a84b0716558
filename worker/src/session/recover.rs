//! After a connection broke: is it the same server, does it still know the job and this rank, and which decisions
//! has it missed? Asked before anything is sent again.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use longshore_proto::{Fault, FaultKind, Step, Version};
use longshore_wire::v1::Phase;

use super::{Core, OwnCommit, SharedCore, retry::Backoff};
use crate::error::{Error, Outdated, Result, StateLost};

/// How often a paused server is asked whether it goes on.
const PAUSE_POLL: Duration = Duration::from_millis(200);

impl Core {
    /// Joins a server again that may have restarted, and brings it to the newest decision.
    pub(crate) async fn recover(core: &SharedCore, server: usize) -> Result<()> {
        let answer = core.describe(server, false, core.options.deadline).await?;
        let progress = answer.progress.unwrap_or_default();
        if progress.phase() == Phase::Loading && core.has_trained() {
            let detail = "it restarted and waits for weights".into();
            return Err(StateLost {
                server: core.peers[server].address.clone(),
                job: core.job().clone(),
                tier: core.spec().tier,
                detail,
            }
            .into());
        }
        core.check_reach(server, Version(progress.version))?;
        // Also where the server remembers the rank: a new process offers another link.
        core.join_server(server, core.incarnation(), false).await?;
        tracing::debug!(server = core.peers[server].address, "joined again");
        let missed = core.commits_after(Step(progress.version));
        if !missed.is_empty() {
            let task = resend_commits(core.clone(), server, missed);
            core.spawn_for_session(task);
        }
        Ok(())
    }

    /// Whether this process has made all that a server at `version` lacks: the gradients since it joined, and no earlier ones.
    fn check_reach(&self, server: usize, version: Version) -> Result<()> {
        let joined = self.joined_at();
        if version >= joined {
            return Ok(());
        }
        let limit = format!("at least {}, which this process joined at", joined.0);
        let remedy = "the step between them is made again";
        let fault = Fault::new(FaultKind::Conflict, "version", version.0, limit, remedy);
        Err(Outdated { server: self.peers[server].address.clone(), job: self.job().clone(), fault }.into())
    }

    /// Whether a server has not heard of the decision on `step`.
    pub(crate) async fn is_undecided(&self, server: usize, step: Step) -> Result<bool> {
        let answer = self.describe(server, false, self.options.deadline).await?;
        Ok(answer.progress.unwrap_or_default().version < step.0)
    }

    /// `Fenced` when a newer process has taken this rank.
    pub(crate) async fn check_not_fenced(&self, server: usize) -> Result<()> {
        let answer = self.describe(server, false, self.options.deadline).await?;
        let mine = answer.ranks.iter().find(|rank| rank.rank == self.options.rank.0);
        let (newest, ours) = (mine.map_or(0, |rank| rank.incarnation), self.incarnation().0);
        if newest <= ours {
            return Ok(());
        }
        let remedy = "stop this process";
        let fault =
            Fault::new(FaultKind::Fenced, "incarnation", ours, format!("{newest}, the newest"), remedy);
        Err(self.explain(server, "Describe", None, fault))
    }

    /// The server's version, once it is not paused.
    pub(crate) async fn version_when_running(&self, server: usize) -> Result<Version> {
        let mut was_paused = false;
        loop {
            let answer = self.describe(server, false, self.options.deadline).await?;
            let progress = answer.progress.unwrap_or_default();
            if progress.phase() != Phase::Paused {
                if was_paused {
                    self.resumed();
                }
                return Ok(Version(progress.version));
            }
            was_paused = true;
            // `patiently` around the caller bounds this by the pause deadline.
            self.paused(&progress.pause_reason);
            tokio::time::sleep(PAUSE_POLL).await;
        }
    }
}

/// Beside the pushes, since a server takes a decision only with all contributions, which are being sent again.
async fn resend_commits(core: SharedCore, server: usize, commits: Vec<Arc<OwnCommit>>) {
    let end = Instant::now() + core.options.deadline;
    for own in commits {
        if let Err(error) = resend(&core, server, &own, end).await {
            return core.fail(error);
        }
    }
}

async fn resend(core: &Core, server: usize, own: &OwnCommit, end: Instant) -> Result<()> {
    let mut backoff = Backoff::new();
    loop {
        match core.commit(server, own).await {
            Err(Error::Call(failed)) if failed.fault.kind == FaultKind::Precondition => {
                core.check_reproducible(server, own.commit.step).await?;
                if !backoff.pause(end).await {
                    return Err(Error::Call(failed));
                }
            }
            other => return other,
        }
    }
}
