//! Takes the newest decision back, if not every server can have it.

use futures_util::future::join_all;
use longshore_proto::{Incarnation, ServerId};
use longshore_wire::v1::{DescribeResponse, StepBackRequest};

use crate::{cluster::Cluster, error::Result};

/// Takes the newest decision back on the servers that have it, if their tier keeps the version before. Earlier
/// processes of rank 0 are fenced everywhere, so none of their commits can follow.
pub(crate) async fn withdraw(cluster: &Cluster, incarnation: Incarnation) -> Result<()> {
    // A fresh answer of each server: a commit that was completed a moment ago is taken back too.
    let answers = cluster.describe_all(false, cluster.options.deadline).await?;
    let common = answers.values().map(version).min().unwrap_or(0);
    let ahead = answers.iter().filter(|(_, answer)| version(answer) > common);
    // Every call runs to its end, whether others fail or not.
    let taken = |answer: &DescribeResponse| {
        let commit = answer.progress.as_ref().and_then(|progress| progress.last_commit.as_ref());
        commit.map_or(0, |commit| commit.decided_by)
    };
    join_all(ahead.map(|(server, answer)| step_back(cluster, server, (common, taken(answer)), incarnation)))
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
