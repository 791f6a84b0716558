//! Takes a rank: a new incarnation on all servers, and one common version before the first step. A new rank 0 brings
//! all servers to that version before it joins.

use std::{collections::BTreeSet, sync::Arc};

use futures_util::future::join_all;
use longshore_proto::{Commit, FaultKind, Incarnation, LeftOut, Origin, Placement, Rank, ServerId, Version};
use longshore_wire::{
    Wire, left_outs_from_wire,
    v1::{BeginRequest, DescribeResponse, JobProgress, LeaveRequest, Phase},
};

use super::{
    open::{judge_all, open},
    resume::spread_resume,
};
use crate::{
    cluster::{Backoff, ByServer, Cluster, renewed},
    envelope::Envelope,
    error::{Error, Misuse, Result, VersionsDiffer},
    host::Instant,
    push::{Gradients, open_lanes},
    rank::{RankState, commit_as, fence, recover, take, version, withdraw},
};

/// The job's progress as this rank begins to take part.
#[derive(Clone, Debug)]
pub struct Joined {
    pub incarnation: Incarnation,
    /// The job's version, which is the same on all servers.
    pub version: Version,
    /// Number of steps that updated, up to `version`.
    pub applied: u64,
    /// The commit that made `version`; None at 0. Its `trainer_state` has the loss scaler and the trainer's bytes.
    pub last_commit: Option<Commit>,
    /// At version 0: the parameters whose state fewer updates made than `applied`.
    pub left_out: Vec<LeftOut>,
    /// The reason of a pause, if the job is paused.
    pub paused: Option<String>,
}

/// Takes the rank. `is_new` says that rank 0 has opened a new job: a server that loses the job again has lost nothing.
pub(super) async fn join(cluster: &Cluster, rank: &RankState, is_new: bool) -> Result<Joined> {
    if rank.has_joined() {
        return Err(Misuse("the session has joined already: connect a new session to join again").into());
    }
    let mut end = Instant::now() + cluster.options.deadline;
    loop {
        let asked = Instant::now();
        let joined = join_once(cluster, rank).await;
        end = renewed(end, asked, cluster.options.deadline);
        match joined {
            // A server died with a version that was not durable yet. This process has used nothing of that version, so
            // it may join again.
            Err(Error::Outdated(outdated)) if Instant::now() < end => {
                tracing::debug!(job = %cluster.job(), error = %outdated, "joining again");
                // A change of servers is another reason. The next one may leave none of the servers known so far.
                cluster.meet_members().await?;
            }
            Err(Error::StateLost(lost)) if is_new && Instant::now() < end => {
                tracing::debug!(job = %cluster.job(), error = %lost, "opening the new job again");
                open(cluster).await?;
            }
            joined => return joined,
        }
    }
}

async fn join_once(cluster: &Cluster, rank: &RankState) -> Result<Joined> {
    let incarnation = take(cluster).await?;
    if cluster.options.rank == Rank(0) {
        take_over(cluster, incarnation).await?;
    }
    let (incarnation, mut progress) = align(cluster, rank, incarnation).await?;
    rank.set_incarnation(incarnation);
    if let Some(placement) = cluster.newest_placement().await {
        let new = cluster.not_joined(&placement);
        cluster.set_placement(placement);
        for (server, address) in new {
            let joined = async {
                cluster.meet(server, &address).await?;
                rank.join_on(cluster, server, incarnation).await
            };
            if cluster.unless_lost(server, joined).await?.is_some() {
                cluster.add_member(server);
            }
        }
    }
    rank.set_joined_at(Version(first_of(&progress).version));
    if progress.values().any(|progress| progress.world_size != cluster.options.world_size) {
        // All servers have one version by now, so none needs a gradient of the former ranks. The number of ranks can
        // change.
        progress = cluster.on_all(|server| rank.join_on(cluster, server, incarnation)).await?;
    }
    for server in cluster.servers() {
        rank.first_link(cluster, server).await?;
    }
    if cluster.options.rank == Rank(0) {
        progress = spread_resume(cluster, progress).await?;
    }
    let first = first_of(&progress);
    let last_commit = first.last_commit.clone();
    let paused = progress.values().find(|progress| progress.phase() == Phase::Paused);
    Ok(Joined {
        incarnation,
        version: Version(first.version),
        applied: first.applied,
        left_out: left_outs_from_wire(first.left_out.clone()),
        last_commit: last_commit.map(|commit| Commit::from_wire(Some(commit))).transpose()?,
        paused: paused.map(|progress| progress.pause_reason.clone()),
    })
}

/// Joins all servers, and waits until they hold one version: rank 0 may be joining too, and completing a commit. Rank
/// 0 keeps the number of ranks: a server that is behind may need the former ranks' contributions. On rank 0,
/// different versions mean that a server died since the takeover and lost a version. Rank 0 then takes over once
/// more.
///
/// If versions differ, a new incarnation fences all servers, and joins them once their versions agree. So a server that
/// lacks the newest decision waits for no gradient of this process. The other servers record that this process joined
/// after the newest step was decided. If a server has lost that step, the record tells rank 0 that gradients are
/// missing. Rank 0 then takes the step back.
async fn align(
    cluster: &Cluster,
    rank: &RankState,
    mut incarnation: Incarnation,
) -> Result<(Incarnation, ByServer<JobProgress>)> {
    let (start, deadline) = (Instant::now(), cluster.options.deadline);
    let mut backoff = Backoff::new();
    let mut progress = join_everywhere(cluster, rank, incarnation).await?;
    // The deadline starts after the join, since the join may have waited for a server that recovered the job.
    let mut end = Instant::now() + deadline;
    let mut has_joined = true;
    loop {
        judge_all(cluster, &progress)?;
        if agree(&progress) {
            if has_joined {
                return Ok((incarnation, progress));
            }
            progress = join_everywhere(cluster, rank, incarnation).await?;
            has_joined = true;
            continue;
        }
        if !backoff.pause(end).await {
            let versions = progress
                .iter()
                .map(|(server, progress)| (cluster.address(server).to_string(), Version(progress.version)));
            return Err(VersionsDiffer {
                job: cluster.job().clone(),
                versions: versions.collect(),
                waited: start.elapsed(),
            }
            .into());
        }
        let asked = Instant::now();
        if cluster.options.rank == Rank(0) {
            incarnation = take(cluster).await?;
            take_over(cluster, incarnation).await?;
            progress = join_everywhere(cluster, rank, incarnation).await?;
            end = renewed(end, asked, deadline);
            continue;
        }
        // The job may have left a server, or gained another, since this rank connected.
        if cluster.meet_members().await? || has_joined {
            incarnation = take(cluster).await?;
            cluster.on_all(|server| fence(cluster, server, incarnation)).await?;
            has_joined = false;
        }
        let answers = cluster.describe_all(false, deadline).await?;
        progress = answers.map(|answer| answer.progress.unwrap_or_default());
        end = renewed(end, asked, deadline);
    }
}

fn agree(progress: &ByServer<JobProgress>) -> bool {
    let first = first_of(progress).version;
    progress.values().all(|progress| progress.version == first)
}

/// The progress on the first server; all servers have the same version.
fn first_of(progress: &ByServer<JobProgress>) -> JobProgress {
    progress.values().next().cloned().unwrap_or_default()
}

/// Connects with a server that joins the job, and joins it as this rank. Tries again until the session ends: rank 0
/// moves no shard to a server that some rank has not joined.
pub(crate) async fn admit(
    cluster: &Arc<Cluster>,
    rank: &Arc<RankState>,
    gradients: &Arc<Gradients>,
    server: ServerId,
    address: &str,
) {
    let mut backoff = Backoff::new();
    while !cluster.has_left(server) {
        let admitted = async {
            cluster.meet(server, address).await?;
            rank.join_on(cluster, server, rank.incarnation()).await?;
            rank.first_link(cluster, server).await?;
            open_lanes(gradients, server)?;
            // The server may have died since it began, and may lack the decision that names it. From here on a lane
            // notices its death.
            recover(cluster, rank, server).await?;
            cluster.add_member(server);
            Ok(())
        };
        let Err(error): Result<()> = admitted.await else { return };
        tracing::warn!(server = address, %error, "a new server of the job cannot be joined yet");
        backoff.pause(Instant::now() + cluster.options.deadline).await;
    }
}

/// Admits the servers that a decision adds, in the background. `first` is the number of the first added server.
pub(crate) fn admit_added(
    cluster: &Arc<Cluster>,
    rank: &Arc<RankState>,
    gradients: &Arc<Gradients>,
    first: u32,
    added: &[String],
) {
    for (server, address) in (first..).map(ServerId).zip(added.iter().cloned()) {
        let (of, rank, gradients) = (Arc::clone(cluster), Arc::clone(rank), Arc::clone(gradients));
        cluster.runtime.spawn_for_session(async move {
            admit(&of, &rank, &gradients, server, &address).await;
        });
    }
}

async fn join_everywhere(
    cluster: &Cluster,
    rank: &RankState,
    incarnation: Incarnation,
) -> Result<ByServer<JobProgress>> {
    cluster.on_all(|server| rank.join_first(cluster, server, incarnation)).await
}

pub(super) async fn leave(cluster: &Cluster, rank: &RankState) -> Result<()> {
    let request = LeaveRequest {
        job: cluster.job().to_string(),
        rank: cluster.options.rank.0,
        incarnation: rank.incarnation().0,
    };
    let leave = |server| {
        let request = &request;
        cluster.call(server, "Leave", None, cluster.options.deadline, move |peer| {
            let request = request.clone();
            async move { peer.training().leave(request).await }
        })
    };
    cluster.on_all(leave).await?;
    Ok(())
}

/// Fences earlier processes of rank 0 on all servers. Versions read afterwards do not change. Then completes the newest
/// decision on servers that lack it. If completing is impossible, takes the decision back. An earlier process may have
/// added servers since this process connected. So servers are fenced until no new one is found.
pub(crate) async fn take_over(cluster: &Cluster, incarnation: Incarnation) -> Result<()> {
    let mut fenced = BTreeSet::new();
    loop {
        let progress = cluster.on_all(|server| fence(cluster, server, incarnation)).await?;
        fenced.extend(progress.ids());
        if cluster.meet_members().await? {
            continue;
        }
        let mut ended = complete_commit(cluster, &progress, incarnation).await;
        if cluster.has_durable_later() {
            ended = match ended {
                // A server has lost the gradients with the decision, and the process that could send them again is
                // gone.
                Err(Error::Call(failed))
                    if matches!(failed.fault.kind, FaultKind::Precondition | FaultKind::Conflict) =>
                {
                    withdraw(cluster, incarnation).await
                }
                // The server has other contributions by now. Completing the step with them would mix two gradients,
                // each on some of the servers.
                Err(Error::Outdated(_)) => withdraw(cluster, incarnation).await,
                other => other,
            };
        }
        ended?;
        if complete_placement(cluster, &fenced, incarnation).await? {
            return Ok(());
        }
    }
}

/// Completes the move of an operator's command that died while it moved a job without ranks. The newest placement goes
/// to all other servers of the same version. Servers that it removes get it too: ranks would wait there for rank 0.
/// Returns false if servers of the newest placement are not fenced yet.
async fn complete_placement(
    cluster: &Cluster,
    fenced: &BTreeSet<ServerId>,
    incarnation: Incarnation,
) -> Result<bool> {
    let mut answers: Vec<_> =
        cluster.describe_all(false, cluster.options.deadline).await?.into_iter().collect();
    for &server in fenced.iter().filter(|&&server| cluster.servers().all(|member| member != server)) {
        answers.extend(cluster.glance(server).await.ok().map(|answer| (server, answer)));
    }
    let of = |answer: &DescribeResponse| {
        (version(answer), answer.scaling.as_ref().map_or(1, |scaling| scaling.epoch))
    };
    let newest = answers.iter().max_by_key(|(_, answer)| of(answer));
    let Some((newest, (version, epoch))) = newest.map(|(server, answer)| (*server, of(answer))) else {
        return Ok(true);
    };
    let is_behind = |answer: &DescribeResponse| of(answer).0 == version && of(answer).1 < epoch;
    let behind: Vec<ServerId> =
        answers.iter().filter(|(_, answer)| is_behind(answer)).map(|(server, _)| *server).collect();
    if behind.is_empty() && epoch <= cluster.placement().epoch.0 {
        return Ok(true);
    }
    let placement = cluster.placement_on(newest).await?;
    // The command may have died before it reached the servers that the placement adds.
    if !cluster.not_joined(&placement).is_empty() {
        cluster.meet_new(placement).await?;
        return Ok(false);
    }
    for server in behind {
        tracing::info!(server = cluster.address(server), version, epoch, "completing a change of servers");
        let placed = place_on(cluster, server, incarnation, (Version(version), &placement));
        cluster.unless_lost(server, placed).await?;
    }
    cluster.set_placement(placement);
    Ok(true)
}

/// Gives a server that takes part in the job another placement of its version.
pub(crate) async fn place_on(
    cluster: &Cluster,
    server: ServerId,
    incarnation: Incarnation,
    (version, placement): (Version, &Placement),
) -> Result<()> {
    let request = BeginRequest {
        job: cluster.job().to_string(),
        incarnation: incarnation.0,
        placement: Some(placement.to_wire()),
        progress: Some(JobProgress { version: version.0, ..JobProgress::default() }),
        ranks: Vec::new(),
        takes_part: true,
    };
    // Slow: a server writes the shards that it has fetched.
    let begun = cluster.call(server, "Begin", None, cluster.options.slow_deadline, |peer| {
        let request = request.clone();
        async move { peer.training().begin(request).await }
    });
    begun.await.map(|_| ())
}

/// Completes a decision that an earlier rank 0 had sent to some servers when it died. The decision goes to the servers
/// one version behind. Each takes the decision if it has the contributions, and refuses it otherwise. A server further
/// behind needs contributions that no process holds. Versions then stay apart, and `align` reports that.
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
    // The job may have left a server since it was fenced.
    let behind = progress
        .iter()
        .filter(|(server, progress)| progress.version + 1 == newest && !cluster.has_left(*server));
    let send = |server| {
        tracing::info!(server = cluster.address(server), step = newest, "completing a commit");
        cluster.unless_lost(server, commit_as(cluster, server, incarnation, &commit, (origins[server], None)))
    };
    // Every call runs to its end: no server may take the decision after others have stepped back.
    let sent = join_all(behind.map(|(server, _)| send(server))).await;
    sent.into_iter().try_for_each(|sent| sent.map(drop))
}

/// Returns for each server the origin of the contributions behind a decision, as far as the commit records it. The
/// origin is unknown on a server that never loses a version alone. Contributions of any origin complete the decision
/// there.
fn origins(cluster: &Cluster, commit: &Commit) -> ByServer<Origin> {
    let said =
        Envelope::decode(&commit.trainer_state).map_or_else(|_| Vec::new(), |envelope| envelope.origins);
    let origin = |server: ServerId| match cluster.tier(server).properties().durable_later {
        true => said.get(server.0 as usize).copied().unwrap_or(Origin::UNKNOWN),
        false => Origin::UNKNOWN,
    };
    ByServer::new(cluster.servers(), origin)
}
