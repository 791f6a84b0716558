//! Collects the gradient statistics of a step from every server, while backward still runs. Rank 0's driver starts a
//! task for each step.

use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    sync::Arc,
};

use longshore_proto::{Fault, FaultKind, Origin, ServerId, ShardId, Step};
use longshore_wire::v1::{ShardStats, StatsRequest};
use tokio::sync::watch;

use crate::{
    cluster::{Backoff, ByServer, Cluster},
    decide::BlockStats,
    error::{Error, Result},
    host::Instant,
    rank::{check_not_fenced, is_undecided},
};

/// The time at which the trainer finished the step. Statistics can be late only from then on.
pub(super) type Finished = watch::Receiver<Option<Instant>>;

/// The basis of a step's decision.
pub(super) struct Collected {
    /// Statistics of every block, in the order of the flat space.
    pub(super) blocks: Vec<BlockStats>,
    /// Parameters without a gradient from any rank, in ascending order.
    pub(super) left_out: Vec<u32>,
    /// For each server, the origin of the gradients that its statistics describe.
    pub(super) origins: ByServer<Origin>,
    /// Shards whose owner and replica hold different gradients.
    pub(super) differing: Vec<ShardId>,
    /// Shards whose state is broken on a server.
    pub(super) broken: BTreeSet<(ShardId, ServerId)>,
}

/// Statistics of all servers.
pub(super) type Statistics = Vec<(ServerId, ServerStatistics)>;

/// Collects the gradient statistics of `step` from all servers.
pub(super) async fn collect(cluster: Arc<Cluster>, step: Step, finished: Finished) -> Result<Statistics> {
    let collect = |server| of_server(&cluster, server, step, finished.clone());
    Ok(cluster.on_all(collect).await?.into_iter().collect())
}

/// Makes the basis of the decision on `step`, once the step before is decided.
pub(super) async fn basis(cluster: &Cluster, step: Step, mut statistics: Statistics) -> Collected {
    let (mut backoff, end) = (Backoff::new(), Instant::now() + cluster.options.deadline);
    let mut is_heard = false;
    loop {
        let collected = combine(cluster, step, &mut statistics);
        if is_heard || collected.differing.is_empty() {
            return collected;
        }
        // If a rank and a server died together, the rank's next process sends gradients only to living holders. Sums
        // then differ. The living holders' sums must stay, so losses are asked for first.
        let answers = cluster.hear_of_losses().await;
        let all_answer = answers.iter().all(|(server, answer)| answer.is_ok() || cluster.has_left(server));
        is_heard = all_answer || !backoff.pause(end).await;
    }
}

fn combine(cluster: &Cluster, step: Step, statistics: &mut Statistics) -> Collected {
    // Earlier decisions may have taken shards from their holders meanwhile.
    for (server, of) in &mut *statistics {
        of.shards.retain(|of| cluster.holders_at(of.shard, step).any(|holder| holder == *server));
    }
    let mut blocks = vec![BlockStats::default(); cluster.layout.blocks() as usize];
    let origin =
        |of_server: &ServerStatistics| of_server.shards.iter().map(|shard| shard.origin).reduce(Origin::and);
    let origins = statistics.iter().map(|(server, of)| (*server, origin(of).unwrap_or_default())).collect();
    let mut by_shard: BTreeMap<ShardId, &ShardStatistics> = BTreeMap::new();
    let (mut differing, mut broken) = (Vec::new(), BTreeSet::new());
    for &(server, ref of_server) in &*statistics {
        broken.extend(of_server.broken.iter().map(|&shard| (shard, server)));
        for of_shard in &of_server.shards {
            let shard = of_shard.shard;
            match by_shard.entry(shard) {
                Entry::Vacant(entry) => drop(entry.insert(of_shard)),
                Entry::Occupied(mut entry) => {
                    if !entry.get().is_alike(of_shard) {
                        differing.push(shard);
                    }
                    // Statistics of the holder that stays count: the replica's, if it is the next owner.
                    let newest = cluster.owner_at(shard, Step(u64::MAX));
                    let stays = cluster.holders_at(shard, step).find(|&holder| holder == newest);
                    if stays.unwrap_or(cluster.owner_at(shard, step)) == server {
                        entry.insert(of_shard);
                    }
                }
            }
        }
    }
    let mut left_out = Vec::new();
    for (shard, ShardStatistics { blocks: stats, left_out: of_shard, .. }) in by_shard {
        left_out.extend(of_shard);
        let range = cluster.layout.shard_blocks(shard);
        blocks[range.start as usize..range.end as usize].copy_from_slice(stats);
    }
    left_out.sort_unstable();
    Collected { blocks, left_out, origins, differing, broken }
}

pub(super) struct ShardStatistics {
    shard: ShardId,
    blocks: Vec<BlockStats>,
    left_out: Vec<u32>,
    origin: Origin,
}

impl ShardStatistics {
    /// Returns true if another server has the same gradient: of the same processes, and with the same statistics.
    fn is_alike(&self, other: &ShardStatistics) -> bool {
        let bits = |of: &BlockStats| (of.sum_squares.to_bits(), of.first_nonfinite);
        !self.origin.differs(other.origin)
            && self.left_out == other.left_out
            && self.blocks.iter().map(bits).eq(other.blocks.iter().map(bits))
    }
}

#[derive(Default)]
pub(super) struct ServerStatistics {
    shards: Vec<ShardStatistics>,
    broken: Vec<ShardId>,
}

impl ServerStatistics {
    fn has(&self, shard: ShardId) -> bool {
        self.shards.iter().any(|of| of.shard == shard)
    }
}

/// Collects the statistics of one server's shards. A broken stream is opened again, and the server then repeats
/// its statistics.
async fn of_server(
    cluster: &Cluster,
    server: ServerId,
    step: Step,
    finished: Finished,
) -> Result<ServerStatistics> {
    // Frozen shards have no gradient.
    let is_frozen = |shard: &ShardId| cluster.layout.is_frozen(*shard);
    let mut statistics = ServerStatistics::default();
    let mut backoff = Backoff::new();
    loop {
        let owned = cluster.held_at(server, step).into_iter().filter(|shard| !is_frozen(shard));
        let owned: Vec<ShardId> = owned.filter(|shard| !statistics.has(*shard)).collect();
        if owned.is_empty() {
            return Ok(statistics);
        }
        let Err(fault) = stream(cluster, server, step, &owned, &mut statistics, &finished).await else {
            continue;
        };
        let since = *finished.borrow();
        let late = match since.filter(|&at| cluster.waits.out_of_patience(at, cluster.options.deadline)) {
            Some(at) => !cluster.is_worth_waiting(at, &|_| true).await,
            None => false,
        };
        let passes = match fault.kind {
            FaultKind::Unavailable | FaultKind::Deadline => true,
            // The server has restarted, and lacks the last commit until rank 0 sends it again. A server that cannot say
            // whether the step is decided is asked again.
            FaultKind::Precondition => {
                fault.field == "step" && is_undecided(cluster, server, step).await.unwrap_or(true)
            }
            _ => false,
        };
        let again = passes && !late;
        if !again {
            // A newer rank 0 has probably decided the step, so its fence is the error to return. A dead server cannot
            // report the fence.
            if let Err(fenced @ Error::Fenced(_)) = check_not_fenced(cluster, server).await {
                return Err(fenced);
            }
            return Err(cluster.explain(server, "Stats", Some(step), fault));
        }
        tracing::debug!(server = cluster.address(server), step = step.0, %fault, "asking for statistics again");
        backoff.pause(Instant::now() + cluster.options.deadline).await;
    }
}

async fn stream(
    cluster: &Cluster,
    server: ServerId,
    step: Step,
    owned: &[ShardId],
    statistics: &mut ServerStatistics,
    finished: &Finished,
) -> Result<(), Fault> {
    let peer = cluster.peer(server);
    let spent = finished.borrow().map_or_else(Default::default, |at| at.elapsed());
    // A wait that has outlasted the deadline asks for one deadline more.
    let deadline = cluster.options.deadline;
    let left = if spent < deadline { deadline - spent } else { deadline }.as_millis().max(1) as u64;
    let request = StatsRequest { job: cluster.job().to_string(), step: step.0, deadline_ms: left };
    let fault = |status: tonic::Status| cluster.fault(server, &status);
    let mut answers = peer.training().stats(request).await.map_err(fault)?.into_inner();
    while !owned.iter().all(|&shard| statistics.has(shard)) {
        let Some(stats) = answers.message().await.map_err(fault)? else {
            let field = format!("statistics from {}", peer.address);
            return Err(Fault::new(
                FaultKind::Unavailable,
                field,
                "ended early",
                "complete",
                "see the server's log",
            ));
        };
        let shard = ShardId(stats.shard);
        statistics.broken = stats.broken.iter().copied().map(ShardId).collect();
        // A server repeats statistics after a break.
        if owned.contains(&shard) && !statistics.has(shard) {
            let (origin, left_out) = (Origin(stats.origin), stats.left_out.clone());
            let blocks = blocks(cluster, stats)?;
            statistics.shards.push(ShardStatistics { shard, blocks, left_out, origin });
        }
    }
    Ok(())
}

fn blocks(cluster: &Cluster, stats: ShardStats) -> Result<Vec<BlockStats>, Fault> {
    let shard = ShardId(stats.shard);
    if stats.blocks.len() != cluster.layout.shard_blocks(shard).len() {
        let value = format!("{} blocks for {shard}", stats.blocks.len());
        let remedy = "server and worker disagree on the layout: use the same version of both";
        return Err(Fault::new(FaultKind::Internal, "stats", value, "an owned shard's blocks", remedy));
    }
    let stats_of = |block: &longshore_wire::v1::BlockStats| BlockStats {
        sum_squares: block.sum_squares,
        first_nonfinite: block.first_nonfinite,
    };
    Ok(stats.blocks.iter().map(stats_of).collect())
}
