//! Has servers make first weights by themselves.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use longshore_proto::{Fault, FaultKind, Initialisation, ServerId, ShardId};
use longshore_wire::{Wire, fault_from_status, v1::MakeWeightsRequest};

use crate::{cluster::Cluster, error::Result, rank::RankState};

/// Asks every server that misses some of these shards to make its weights, and waits for all of them. The others are asked
/// before: they refuse it where they were filled with other weights, which an earlier process of this rank has had made.
/// Returns those that failed.
pub(super) fn make(
    cluster: &Cluster,
    rank: &RankState,
    initialisation: &Initialisation,
    missing: &BTreeSet<ShardId>,
    end: Instant,
) -> Result<Vec<(ServerId, Fault)>> {
    let lacking: BTreeSet<ServerId> = missing.iter().map(|&shard| cluster.owner(shard)).collect();
    let request = MakeWeightsRequest {
        job: cluster.job().to_string(),
        incarnation: rank.incarnation().0,
        initialisation: Some(initialisation.to_wire()),
    };
    let full = cluster.servers().filter(|server| !lacking.contains(server)).collect();
    let refused = ask(cluster, &full, &request, end)?;
    if !refused.is_empty() {
        return Ok(refused);
    }
    ask(cluster, &lacking, &request, end)
}

fn ask(
    cluster: &Cluster,
    servers: &BTreeSet<ServerId>,
    request: &MakeWeightsRequest,
    end: Instant,
) -> Result<Vec<(ServerId, Fault)>> {
    let ask = |server: ServerId| {
        let asked = servers.contains(&server).then(|| (cluster.peer(server).training(), request.clone()));
        let left = end.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        async move {
            let (mut training, request) = asked?;
            match tokio::time::timeout(left, training.make_weights(request)).await {
                Ok(answer) => answer.err().map(|status| fault_from_status(&status, cluster.address(server))),
                Err(_) => Some(late(left)),
            }
        }
    };
    let answers = cluster.runtime.block_on(async { Ok(cluster.on_each(ask).await) })?;
    Ok(answers.into_iter().filter_map(|(server, fault)| Some((server, fault?))).collect())
}

fn late(waited: Duration) -> Fault {
    let remedy = "see how many shards are missing with `longshore status`, or raise slow_deadline";
    Fault::new(FaultKind::Deadline, "MakeWeights", format!("unanswered after {waited:?}"), "answered", remedy)
}
