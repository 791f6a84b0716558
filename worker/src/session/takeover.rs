//! A new rank 0 brings all servers to one version, before it joins.

use futures_util::future::join_all;
use longshore_proto::{Commit, FaultKind, Incarnation, Origin, ServerId};
use longshore_wire::{
    Wire,
    v1::{JobProgress, Phase},
};

use crate::{
    cluster::{ByServer, Cluster},
    envelope::Envelope,
    error::{Error, Result},
    rank::{commit_as, fence, withdraw},
};

/// Fences earlier processes of rank 0 on all servers, so that the versions read afterwards do not change. Then
/// completes the newest decision on servers that lack it, or takes it back if that is impossible.
pub(super) async fn take_over(cluster: &Cluster, incarnation: Incarnation) -> Result<()> {
    let progress = cluster.on_all(|server| fence(cluster, server, incarnation)).await?;
    let ended = complete_commit(cluster, &progress, incarnation).await;
    if !cluster.spec().properties().durable_later {
        return ended;
    }
    match ended {
        // A server has lost the gradients with the decision, and the process that could send them again is gone.
        Err(Error::Call(failed))
            if matches!(failed.fault.kind, FaultKind::Precondition | FaultKind::Conflict) =>
        {
            withdraw(cluster, incarnation).await
        }
        // The server has other contributions by now. Completing the step with those would mix two gradients: one
        // on some servers, another on the rest.
        Err(Error::Outdated(_)) => withdraw(cluster, incarnation).await,
        other => other,
    }
}

/// Rank 0 may have died between its commits. The newest decision then goes to the servers one version behind,
/// which have its contributions, or refuse it. A server further behind needs contributions that no process holds.
/// Versions then stay apart, and `align` reports that.
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
    let origins = origins(cluster, &commit);
    let behind = progress.iter().filter(|(_, progress)| progress.version + 1 == newest);
    let send = |server| {
        tracing::info!(server = cluster.address(server), step = newest, "completing a commit");
        commit_as(cluster, server, incarnation, &commit, (origins[server], None))
    };
    // Every call runs to its end, so that no server takes the decision after others have given it back.
    join_all(behind.map(|(server, _)| send(server))).await.into_iter().collect()
}

/// Returns the origin on each server that a decision was made from, as far as its maker said. If no server can
/// step back, origins are unknown, and the decision is completed with the contributions that are there.
fn origins(cluster: &Cluster, commit: &Commit) -> ByServer<Origin> {
    let said = match cluster.spec().properties().durable_later {
        true => {
            Envelope::decode(&commit.trainer_state).map_or_else(|_| Vec::new(), |envelope| envelope.origins)
        }
        false => Vec::new(),
    };
    let origin = |ServerId(server)| said.get(server as usize).copied().unwrap_or(Origin::UNKNOWN);
    ByServer::new(cluster.servers().len(), origin)
}
