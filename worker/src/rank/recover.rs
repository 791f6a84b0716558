//! Brings a server back after a connection to it broke, before any gradient is sent again. Checks that the server still
//! has the job, joins the server again, and sends the decisions that the server lacks. Takes the newest decision back
//! if not every server can have it. Called by lanes, drivers and takeovers.

use std::{sync::Arc, time::Duration};

use futures_util::future::join_all;
use longshore_proto::{
    Fault, FaultKind, Incarnation, ServerId, Step, Version,
    fault::{ORIGIN, OWED},
};
use longshore_wire::v1::{DescribeResponse, Phase, StepBackRequest};

use super::{RankState, commits::OwnCommit};
use crate::{
    cluster::{Backoff, Cluster, Impatience},
    error::{CallFailed, Error, Result, StateLost},
    host::{self, Instant},
};

/// Pause between two looks at a paused server.
const PAUSE_POLL: Duration = Duration::from_millis(200);

/// Joins a server that may have restarted, and starts to send the decisions that the server lacks. Returns the server's
/// version.
pub(crate) async fn recover(
    cluster: &Arc<Cluster>,
    rank: &Arc<RankState>,
    server: ServerId,
) -> Result<Version> {
    let answer = cluster.describe(server, false, cluster.options.deadline).await?;
    let progress = answer.progress.unwrap_or_default();
    if progress.phase() == Phase::Loading && rank.has_trained() {
        let detail = "it restarted and waits for weights".into();
        return Err(StateLost {
            server: cluster.address(server).into(),
            job: cluster.job().clone(),
            tier: cluster.tier(server),
            detail,
        }
        .into());
    }
    check_reach(cluster, rank, server, Version(progress.version))?;
    // A server that remembers the rank is joined too, since its new process offers another link. The process may have
    // changed since the first question, so its version is checked again.
    let version = Version(rank.rejoin(cluster, server).await?.version);
    check_reach(cluster, rank, server, version)?;
    tracing::debug!(server = cluster.address(server), "joined again");
    let missed = rank.commits.after(Step(version.0));
    if !missed.is_empty() {
        cluster.runtime.spawn_for_session(resend_commits(cluster.clone(), server, missed));
    }
    Ok(version)
}

/// Checks that this process has the gradients of all steps that a server at `version` lacks. The gradients of this
/// process begin at the version at which it joined.
pub(crate) fn check_reach(
    cluster: &Cluster,
    rank: &RankState,
    server: ServerId,
    version: Version,
) -> Result<()> {
    let joined = rank.joined_at();
    if version >= joined {
        return Ok(());
    }
    let limit = format!("at least {}, which this process joined at", joined.0);
    let remedy = "the step between them is made again";
    let fault = Fault::new(FaultKind::Conflict, "version", version.0, limit, remedy);
    Err(cluster.outdated(server, fault))
}

/// Returns true if a server has not heard of the decision on `step`.
pub(crate) async fn is_undecided(cluster: &Cluster, server: ServerId, step: Step) -> Result<bool> {
    let answer = cluster.describe(server, false, cluster.options.deadline).await?;
    Ok(version(&answer) < step.0)
}

/// Returns `Fenced` if a newer process has taken this rank.
pub(crate) async fn check_not_fenced(cluster: &Cluster, server: ServerId) -> Result<()> {
    let answer = cluster.describe(server, false, cluster.options.deadline).await?;
    cluster.check_newest(server, &answer)
}

/// Returns the cause of an error. `Outdated` becomes `Fenced` if a newer process has taken this rank. `StateLost`, or
/// shards that are elsewhere, become `Outdated` if the job's servers have changed since this process connected.
pub(crate) fn cause(cluster: &Cluster, error: Error) -> Error {
    let error = match error {
        Error::StateLost(lost) => {
            cluster.runtime.block_on(cluster.check_not_moved(&lost.server)).err().unwrap_or(lost.into())
        }
        Error::Call(failed) if ["shard", "placement.owners"].contains(&&*failed.fault.field) => cluster
            .runtime
            .block_on(cluster.check_not_moved(&failed.server))
            .err()
            .unwrap_or(Error::Call(failed)),
        error => error,
    };
    let Error::Outdated(_) = error else { return error };
    let first = cluster.first();
    let answer = cluster.runtime.block_on(cluster.glance(first));
    match answer.and_then(|answer| cluster.check_newest(first, &answer)) {
        Err(fenced @ Error::Fenced(_)) => fenced,
        _ => error,
    }
}

/// Returns the server's version, once the server is not paused.
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
        // The caller is inside `patiently`, which bounds this loop by the pause deadline.
        cluster.waits.paused(&progress.pause_reason);
        host::sleep(PAUSE_POLL).await;
    }
}

/// Sends commits again, in order, while lanes send the gradients again. A server takes a decision only once it has all
/// contributions.
async fn resend_commits(cluster: Arc<Cluster>, server: ServerId, commits: Vec<Arc<OwnCommit>>) {
    for own in commits {
        if let Err(error) = decide_on(&cluster, server, &own).await
            && !cluster.has_left(server)
        {
            return cluster.waits.fail(error);
        }
    }
}

/// Sends a commit to one server. Tries again if an operator paused the job just then, and while a restarted server
/// still lacks contributions.
pub(crate) async fn decide_on(cluster: &Cluster, server: ServerId, own: &OwnCommit) -> Result<()> {
    let deadline = cluster.options.deadline;
    let (mut since, mut backoff) = (Instant::now(), Backoff::new());
    loop {
        let sent = Instant::now();
        let error = match own.send(cluster, server).await {
            Err(Error::Call(failed)) if failed.fault.kind == FaultKind::Precondition => failed,
            other => return other,
        };
        await_running(cluster, server, &error).await?;
        check_reproducible(cluster, server, own.commit.step).await?;
        // A call longer than the deadline has waited for the server's recovery, so the time begins anew.
        if sent.elapsed() > deadline {
            since = Instant::now();
        }
        // A rank that has joined again computes the step first, however long that takes.
        let is_late = cluster.waits.out_of_patience(since, deadline);
        if is_late && !(error.fault.field == OWED && cluster.is_worth_waiting(since, &|_| true).await) {
            return Err(Error::Call(error));
        }
        backoff.pause(Instant::now() + deadline).await;
    }
}

async fn await_running(cluster: &Cluster, server: ServerId, error: &CallFailed) -> Result<()> {
    // A server that recovers the job does not say whether the job is paused.
    match cluster.patiently(version_when_running(cluster, server)).await {
        Ok(version) => version.map(|_| ()),
        Err(Impatience::Failed(failure)) => Err(failure),
        Err(Impatience::Elapsed(_)) => Err(error.clone().into()),
    }
}

/// Checks that a step which `server` lacks can be made again from the same contributions. A rank whose process was
/// replaced after the decision cannot send its contribution again. Servers that do not answer at once are not
/// asked again.
///
/// # Errors
/// `Outdated` if the step cannot be made again: this rank 0 must take over as a new process would.
async fn check_reproducible(cluster: &Cluster, server: ServerId, step: Step) -> Result<()> {
    let answers = cluster.on_each(|server| cluster.glance(server)).await;
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
    Err(cluster.outdated(server, fault))
}

/// Takes the newest decision back on the servers that have it, if their tier keeps the version before. Earlier
/// processes of rank 0 are fenced everywhere, so none of their commits can follow.
pub(crate) async fn withdraw(cluster: &Cluster, incarnation: Incarnation) -> Result<()> {
    // A fresh answer of each server: a commit that was completed a moment ago is taken back too.
    let answers = cluster.describe_all(false, cluster.options.deadline).await?;
    let common = answers.values().map(version).min().unwrap_or(0);
    let ahead: Vec<_> = answers.iter().filter(|(_, answer)| version(answer) > common).collect();
    let lost = answers.iter().find(|(_, answer)| version(answer) == common);
    let keeps = |server: ServerId| !cluster.tier(server).properties().durable_later;
    if let (Some((lost, _)), Some((keeps, _))) = (lost, ahead.iter().find(|(server, _)| keeps(*server))) {
        let (server, tier) = (cluster.address(lost).into(), cluster.tier(*keeps));
        let detail = format!("a version after {common}, which servers of tier {tier} do not take back");
        return Err(StateLost { server, job: cluster.job().clone(), tier, detail }.into());
    }
    // Every call runs to its end, whether others fail or not.
    let taken = |answer: &DescribeResponse| {
        let commit = answer.progress.as_ref().and_then(|progress| progress.last_commit.as_ref());
        commit.map_or(0, |commit| commit.decided_by)
    };
    join_all(
        ahead
            .into_iter()
            .map(|(server, answer)| step_back(cluster, server, (common, taken(answer)), incarnation)),
    )
    .await
    .into_iter()
    .collect()
}

async fn step_back(
    cluster: &Cluster,
    server: ServerId,
    (version, decided_by): (u64, u64),
    incarnation: Incarnation,
) -> Result<()> {
    let (job, incarnation) = (cluster.job().to_string(), incarnation.0);
    let request = StepBackRequest { job, incarnation, version, decided_by };
    // Slow: the server reads all of its state.
    let answer = cluster.call(server, "StepBack", None, cluster.options.slow_deadline, |peer| {
        let request = request.clone();
        async move { peer.admin().step_back(request).await }
    });
    answer.await?;
    let server = cluster.address(server);
    tracing::info!(server, version, "stepped back to the newest version that all servers hold");
    Ok(())
}

pub(crate) fn version(answer: &DescribeResponse) -> u64 {
    answer.progress.as_ref().map_or(0, |progress| progress.version)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::fake_for_tests::{Answer, DEADLINE, cluster, says};

    #[test]
    fn a_decision_waits_while_a_server_recovers_the_job() {
        let since = Instant::now();
        let (cluster, _runtime) = cluster(vec![says(move |_| match since.elapsed() < DEADLINE * 6 {
            true => Answer::recovering(),
            false => Answer::described(1),
        })]);
        let fault = Fault::new(FaultKind::Precondition, "phase", "paused", "training", "resume it");
        let refused = cluster.explain(ServerId(0), "Commit", None, fault);
        let Error::Call(refused) = refused else { panic!("{refused}") };
        cluster.runtime.block_on(await_running(&cluster, ServerId(0), &refused)).unwrap();
    }
}
