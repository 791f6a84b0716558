//! Brings a server back after a connection to it broke: checks that it still has the job, joins it again, and sends it
//! the decisions that it lacks. This comes before any gradient is sent again.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use longshore_proto::{Fault, FaultKind, ServerId, Step, Version, fault::ORIGIN};
use longshore_wire::v1::{DescribeResponse, Phase};

use super::{RankState, commits::OwnCommit};
use crate::{
    cluster::{Backoff, Cluster},
    error::{Error, Outdated, Result, StateLost},
};

/// How often a paused server is asked whether it goes on.
const PAUSE_POLL: Duration = Duration::from_millis(200);
/// The longest wait for one server's answer while another server is waited for.
const GLANCE: Duration = Duration::from_secs(1);

/// Joins a server again that may have restarted, and starts to send it the decisions that it lacks.
pub(crate) async fn recover(cluster: &Arc<Cluster>, rank: &RankState, server: ServerId) -> Result<()> {
    let answer = cluster.describe(server, false, cluster.options.deadline).await?;
    let progress = answer.progress.unwrap_or_default();
    if progress.phase() == Phase::Loading && rank.has_trained() {
        let detail = "it restarted and waits for weights".into();
        return Err(StateLost {
            server: cluster.address(server).into(),
            job: cluster.job().clone(),
            tier: cluster.spec().tier,
            detail,
        }
        .into());
    }
    check_reach(cluster, rank, server, Version(progress.version))?;
    // This is done even where the server remembers the rank, since a new process offers another link.
    rank.rejoin(cluster, server).await?;
    tracing::debug!(server = cluster.address(server), "joined again");
    let missed = rank.commits.after(Step(progress.version));
    if !missed.is_empty() {
        let task = resend_commits(cluster.clone(), server, missed);
        cluster.runtime.spawn_for_session(task);
    }
    Ok(())
}

/// Checks that this process has the gradients of all steps that a server at `version` lacks. It has those since it
/// joined.
fn check_reach(cluster: &Cluster, rank: &RankState, server: ServerId, version: Version) -> Result<()> {
    let joined = rank.joined_at();
    if version >= joined {
        return Ok(());
    }
    let limit = format!("at least {}, which this process joined at", joined.0);
    let remedy = "the step between them is made again";
    let fault = Fault::new(FaultKind::Conflict, "version", version.0, limit, remedy);
    Err(Outdated { server: cluster.address(server).into(), job: cluster.job().clone(), fault }.into())
}

/// Whether a server has not heard of the decision on `step`.
pub(crate) async fn is_undecided(cluster: &Cluster, server: ServerId, step: Step) -> Result<bool> {
    let answer = cluster.describe(server, false, cluster.options.deadline).await?;
    Ok(version(&answer) < step.0)
}

/// Gives `Fenced` when a newer process has taken this rank.
pub(crate) async fn check_not_fenced(cluster: &Cluster, rank: &RankState, server: ServerId) -> Result<()> {
    let answer = cluster.describe(server, false, cluster.options.deadline).await?;
    let mine = answer.ranks.iter().find(|known| known.rank == cluster.options.rank.0);
    let (newest, ours) = (mine.map_or(0, |rank| rank.incarnation), rank.incarnation().0);
    if newest <= ours {
        return Ok(());
    }
    let remedy = "stop this process";
    let fault = Fault::new(FaultKind::Fenced, "incarnation", ours, format!("{newest}, the newest"), remedy);
    Err(cluster.explain(server, "Describe", None, fault))
}

/// The server's version, once it is not paused.
pub(crate) async fn version_when_running(cluster: &Cluster, server: ServerId) -> Result<Version> {
    let mut was_paused = false;
    loop {
        let answer = cluster.describe(server, false, cluster.options.deadline).await?;
        let progress = answer.progress.unwrap_or_default();
        if progress.phase() != Phase::Paused {
            if was_paused {
                cluster.waits.resumed();
            }
            return Ok(Version(progress.version));
        }
        was_paused = true;
        // The caller is inside `patiently`, which bounds this by the pause deadline.
        cluster.waits.paused(&progress.pause_reason);
        tokio::time::sleep(PAUSE_POLL).await;
    }
}

/// Sends commits again, in order. It runs beside the pushes, since a server takes a decision only once it has all
/// contributions, which are being sent again meanwhile.
async fn resend_commits(cluster: Arc<Cluster>, server: ServerId, commits: Vec<Arc<OwnCommit>>) {
    let end = Instant::now() + cluster.options.deadline;
    for own in commits {
        if let Err(error) = resend(&cluster, server, &own, end).await {
            return cluster.waits.fail(error);
        }
    }
}

async fn resend(cluster: &Cluster, server: ServerId, own: &OwnCommit, end: Instant) -> Result<()> {
    let mut backoff = Backoff::new();
    loop {
        match own.send(cluster, server).await {
            Err(Error::Call(failed)) if failed.fault.kind == FaultKind::Precondition => {
                check_reproducible(cluster, server, own.commit.step).await?;
                if !backoff.pause(end).await {
                    return Err(Error::Call(failed));
                }
            }
            other => return other,
        }
    }
}

/// Checks that a step which `server` lacks can be made from the same contributions again. It cannot be if a rank's
/// process was replaced after the step was decided. Servers that do not answer at once are not asked again.
///
/// # Errors
/// `Outdated` when it cannot: this rank 0 must take over as a new one would.
pub(crate) async fn check_reproducible(cluster: &Cluster, server: ServerId, step: Step) -> Result<()> {
    let answers = cluster.on_each(|server| cluster.describe(server, false, GLANCE)).await;
    let decided = answers.values().flatten().filter(|answer| version(answer) >= step.0);
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
    Err(Outdated { server: cluster.address(server).into(), job: cluster.job().clone(), fault }.into())
}

pub(crate) fn version(answer: &DescribeResponse) -> u64 {
    answer.progress.as_ref().map_or(0, |progress| progress.version)
}
