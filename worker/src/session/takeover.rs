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

/// First ends what earlier processes of rank 0 may do on all servers, so that the versions read after that change no
/// more. Then completes the newest decision where it is missing, or takes it back where that cannot be.
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
        // It has others by now: completed with those, the step would be of one gradient on some servers and of another on
        // the rest.
        Err(Error::Outdated(_)) => withdraw(cluster, incarnation).await,
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
    let origins = origins(cluster, &commit);
    let behind = progress.iter().filter(|(_, progress)| progress.version + 1 == newest);
    let send = |server| {
        tracing::info!(server = cluster.address(server), step = newest, "completing a commit");
        commit_as(cluster, server, incarnation, &commit, (origins[server], None))
    };
    // Each is heard to its end, so that none takes the decision after the others have given it back.
    join_all(behind.map(|(server, _)| send(server))).await.into_iter().collect()
}

/// The contributions on each server that a decision was made from, as far as its maker said. Where no server can step back
/// they are left unknown, and the decision is completed with whatever is there.
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
