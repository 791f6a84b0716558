//! A new rank 0 brings all servers to one version, before it joins.

use futures_util::future::try_join_all;
use longshore_proto::{Commit, FaultKind, Incarnation, Origin, ServerId};
use longshore_wire::{
    Wire,
    v1::{JobProgress, Phase, StepBackRequest},
};

use crate::{
    cluster::{ByServer, Cluster},
    error::{Error, Result},
    rank::{commit_as, fence, version},
};

/// First ends what earlier processes of rank 0 may do on all servers, so that the versions read after that change no
/// more. Then completes the newest decision where it is missing, or takes it back where that cannot be.
pub(super) async fn take_over(cluster: &Cluster, incarnation: Incarnation) -> Result<()> {
    let progress = cluster.on_all(|server| fence(cluster, server, incarnation)).await?;
    match complete_commit(cluster, &progress, incarnation).await {
        // A server has lost the gradients with the decision, and the process that could send them again is gone.
        Err(Error::Call(failed))
            if failed.fault.kind == FaultKind::Precondition && cluster.spec().properties().durable_later =>
        {
            withdraw(cluster, incarnation).await
        }
        other => other,
    }
}

/// Rank 0 may have died between its commits. The newest decision then goes to the servers one version behind, which
/// have the contributions that it was made from, or refuse it. A server further behind needs what nobody holds any
/// more: the versions stay apart, and `align` reports that.
async fn complete_commit(
    cluster: &Cluster,
    progress: &ByServer<JobProgress>,
    incarnation: Incarnation,
) -> Result<()> {
    let newest = progress.values().map(|progress| progress.version).max().unwrap_or(0);
    let ahead = progress.values().find(|progress| progress.version == newest);
    let commit = ahead.and_then(|progress| progress.last_commit.clone());
    let loading = progress.values().any(|progress| progress.phase() == Phase::Loading);
    let (Some(commit), false) = (commit, loading) else { return Ok(()) };
    let commit = Commit::from_wire(Some(commit))?;
    let behind = progress.iter().filter(|(_, progress)| progress.version + 1 == newest);
    let send = |server| {
        tracing::info!(server = cluster.address(server), step = newest, "completing a commit");
        // The origin is unknown: it went with the process that made the decision, so the server takes whatever it
        // has.
        commit_as(cluster, server, incarnation, &commit, (Origin::UNKNOWN, None))
    };
    try_join_all(behind.map(|(server, _)| send(server))).await?;
    Ok(())
}

/// Takes the newest decision back on the servers that have it by now, where their tier keeps the version before.
async fn withdraw(cluster: &Cluster, incarnation: Incarnation) -> Result<()> {
    // They are asked again: a commit that was completed a moment ago is taken back too.
    let answers = cluster.describe_all(false, cluster.options.deadline).await?;
    let common = answers.values().map(version).min().unwrap_or(0);
    let ahead = answers.iter().filter(|(_, answer)| version(answer) > common);
    try_join_all(ahead.map(|(server, _)| step_back(cluster, server, common, incarnation))).await?;
    Ok(())
}

async fn step_back(
    cluster: &Cluster,
    server: ServerId,
    version: u64,
    incarnation: Incarnation,
) -> Result<()> {
    let request = StepBackRequest { job: cluster.job().to_string(), incarnation: incarnation.0, version };
    // This is slow: the server reads all of its state.
    let answer = cluster.call(server, "StepBack", None, cluster.options.slow_deadline, |peer| {
        let request = request.clone();
        async move { peer.admin().step_back(request).await }
    });
    answer.await?;
    let server = cluster.address(server);
    tracing::info!(server, version, "stepped back to the newest version that all servers hold");
    Ok(())
}
