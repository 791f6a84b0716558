//! Opens a job on servers that it is not on yet, and plans the moves to them. Called by rank 0's driver in the
//! background (`moves`), and by an operator's command in rank 0's place (`idle`).

use std::{
    collections::BTreeSet,
    future::Future,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

use futures_util::future::{join_all, try_join_all};
use longshore_proto::{
    Fault, FaultKind, JobSpec, Placement, ServerId, ShardId, TierKind, Version, limits::PROTOCOL,
};
use longshore_wire::{
    Wire, fault_from_status,
    v1::{
        BeginRequest, JoinRequest, ListJobsRequest, ListJobsResponse, OpenJobRequest, OpenJobResponse,
        RankMember, RetireRequest,
    },
};
use tonic::{Response, Status};

use super::{
    moves::{Pace, Plan},
    plan::{Moved, check_holders, plan_moves},
};
use crate::{
    cluster::{Cluster, Peer},
    error::{CallFailed, Error, Result},
    host::{self, Instant},
    rank::RankState,
};

/// A plan that failed.
pub(super) struct Unprepared {
    pub(super) error: Error,
    /// Servers that were opened for the plan, and may keep memory for it.
    pub(super) opened: Vec<Added>,
}

impl<E: Into<Error>> From<E> for Unprepared {
    fn from(error: E) -> Unprepared {
        Unprepared { error: error.into(), opened: Vec::new() }
    }
}

/// A server that is opened for the job and takes no part yet.
pub(super) struct Added {
    pub(super) server: ServerId,
    pub(super) peer: Peer,
}

/// Returns the tier for a job's new servers. `wanted` holds the wish's tier, and the tiers of wanted servers with the
/// job. If `wanted` is empty, the tiers of the `present` servers decide.
///
/// # Errors
/// `Precondition` for several tiers: a server on drives may have to step back, and a server of another tier never does.
pub fn wanted_tier(
    wanted: BTreeSet<TierKind>,
    present: impl Iterator<Item = TierKind>,
) -> Result<TierKind, Fault> {
    let tiers = if wanted.is_empty() { present.collect() } else { wanted };
    match tiers.first() {
        Some(&tier) if tiers.len() == 1 => Ok(tier),
        _ => {
            let value = tiers.into_iter().map(TierKind::name).collect::<Vec<_>>().join(" and ");
            let limit = "one tier on all servers that the job shall have";
            let remedy = "name a tier, and servers that the job is not on yet or that are in that tier";
            Err(Fault::new(FaultKind::Precondition, "tier", value, limit, remedy))
        }
    }
}

/// Refuses a target that gives a server on drives more than `most` shards.
fn check_gains(target: &Placement, moves: &[(ShardId, ServerId)], most: usize) -> Result<(), Fault> {
    let gaining: BTreeSet<ServerId> = moves.iter().map(|(_, to)| *to).collect();
    let of = |server: &ServerId| (*server, target.held(*server).len());
    let Some((server, shards)) = gaining.iter().map(of).find(|(_, shards)| *shards > most) else {
        return Ok(());
    };
    let value = format!("{shards} of server {}", target.servers[server.0 as usize]);
    let limit = format!("at most {most}, on drives and without ranks");
    let remedy = "start the job's ranks: each step moves a part; or name more servers";
    Err(Fault::new(FaultKind::Precondition, "shards", value, limit, remedy))
}

/// Opens the job on servers that it is not on yet, and plans the moves. `most` is the largest number of shards of a
/// server on drives that gains shards.
pub(super) async fn prepare(
    cluster: Arc<Cluster>,
    placement: Arc<Placement>,
    (wanted, tier): (Vec<String>, Option<TierKind>),
    asked: u64,
    max_exposed: f64,
    most: usize,
) -> Result<Plan, Unprepared> {
    let mut spec = cluster.spec().clone();
    let known =
        |address: &String| placement.members().find(|of| placement.servers[of.0 as usize] == *address);
    let (mut members, mut new) = (Vec::new(), Vec::new());
    for address in &wanted {
        match known(address) {
            Some(server) => members.push(server),
            None => new.push(address.clone()),
        }
    }
    let tiers = members.iter().map(|&server| cluster.tier(server)).chain(tier).collect();
    spec.tier = wanted_tier(tiers, placement.members().map(|server| cluster.tier(server)))?;
    let open = async |spec: &JobSpec,
                      server: ServerId,
                      peer: &Peer,
                      placement: &Placement,
                      is_new|
           -> Result<OpenJobResponse> {
        let request = OpenJobRequest {
            spec: Some(spec.to_wire()),
            placement: Some(placement.to_wire()),
            server: server.0,
            protocol: PROTOCOL,
            is_new,
            is_there: !is_new,
            incarnation: cluster.incarnation.load(Relaxed),
        };
        // Slow: a server allocates and touches all of its memory before it answers.
        let time = cluster.options.slow_deadline;
        ask(&cluster, peer, "OpenJob", time, async { peer.training().open_job(request).await }).await
    };
    for &server in &members {
        let answer = open(&spec, server, cluster.peer(server), &placement, false).await?;
        // The job may take more ranks than this run has.
        spec = spec.of_ranks(answer.world_size.max(spec.world_size));
    }
    let first = placement.servers.len() as u32;
    let numbered: Vec<(ServerId, String)> = (first..).map(ServerId).zip(new).collect();
    let addresses: Vec<String> = numbered.iter().map(|(_, address)| address.clone()).collect();
    members.extend(numbered.iter().map(|(server, _)| *server));
    let dialled = numbered.into_iter().map(async |(server, address)| -> Result<Added> {
        let start = Instant::now();
        let peer = cluster.dial(&address, (start, start + cluster.options.deadline)).await?;
        Ok(Added { server, peer })
    });
    let added = try_join_all(dialled).await?;
    let known =
        members.iter().filter(|server| server.0 < first).map(|&server| (server, cluster.peer(server)));
    let all = known.chain(added.iter().map(|Added { server, peer }| (*server, peer)));
    let rooms = all.map(async |(server, peer)| -> Result<(ServerId, ListJobsResponse)> {
        let (request, time) = (ListJobsRequest { spec: Some(spec.to_wire()) }, cluster.options.deadline);
        let answer = ask(&cluster, peer, "ListJobs", time, async { peer.admin().list_jobs(request).await });
        Ok((server, answer.await?))
    });
    let mut rooms = try_join_all(rooms).await?;
    rooms.retain(|(_, answer)| !answer.is_witness);
    let holders: Vec<ServerId> = rooms.iter().map(|(server, _)| *server).collect();
    check_holders(spec.replicas, &holders, &wanted)?;
    let room = rooms.into_iter().filter_map(|(server, of)| Some((server, of.shard_room? as usize))).collect();
    let Moved { moves, replicas, placement: mut target } =
        plan_moves(&placement, &cluster.layout, &holders, &addresses, &room);
    if spec.tier == TierKind::Nvme {
        check_gains(&target, &moves, most)?;
    }
    target.epoch.0 += 1;
    let (target, spec) = (&target, &spec);
    let gets = |server: ServerId| moves.iter().chain(&replicas).any(|(_, to)| *to == server);
    for &server in members.iter().filter(|&&server| server.0 < first && gets(server)) {
        open(spec, server, cluster.peer(server), target, false).await?;
    }
    let opened = added.iter().map(|Added { server, peer }| open(spec, *server, peer, target, true));
    if let Some(error) = join_all(opened).await.into_iter().find_map(Result::err) {
        return Err(Unprepared { error, opened: added });
    }
    let (shards, copies) = (moves.len(), replicas.len());
    tracing::info!(job = %cluster.job(), servers = ?wanted, shards, replicas = copies, max_exposed, "moving to other servers");
    let (moves, replicas) = (moves.into(), replicas.into());
    let since = placement.epoch;
    Ok(Plan { asked, since, wanted, added, moves, replicas, pace: Pace::new(max_exposed) })
}

/// Ends the job on a server that was opened for it and takes no part.
pub(super) async fn give_up(cluster: &Cluster, Added { peer, .. }: &Added, incarnation: u64) {
    let request = RetireRequest { job: cluster.job().to_string(), incarnation, placement: None };
    let retired = async { peer.training().retire(request).await };
    if let Err(error) = ask(cluster, peer, "Retire", cluster.options.deadline, retired).await {
        tracing::info!(server = peer.address, %error, "gives the job up by itself, in an hour");
    }
}

/// Begins new servers at a version that all servers of the job have. Returns their addresses.
pub(super) async fn begin_all(
    cluster: &Cluster,
    rank: &RankState,
    added: &[Added],
    version: Version,
) -> Result<Vec<String>> {
    let (job, incarnation) = (cluster.job().to_string(), rank.incarnation().0);
    let answer = cluster.glance(cluster.first()).await?;
    let progress = answer.progress.filter(|progress| progress.version == version.0);
    let Some(progress) = progress else {
        let remedy = "it is tried again";
        return Err(Fault::new(FaultKind::Unavailable, "version", "another one", version.0, remedy).into());
    };
    let joined = answer.ranks.into_iter().filter(|rank| rank.incarnation != 0 && !rank.left);
    let ranks: Vec<_> = joined
        .map(|rank| RankMember { rank: rank.rank, incarnation: rank.incarnation, joined_at: rank.joined_at })
        .collect();
    let placement = Some(cluster.placement().to_wire());
    let begin = |added: &Added| {
        let join = JoinRequest { job: job.clone(), rank: 0, incarnation, ..Default::default() };
        let (placement, progress) = (placement.clone(), Some(progress.clone()));
        let begin = BeginRequest {
            job: job.clone(),
            incarnation,
            placement,
            progress,
            ranks: ranks.clone(),
            takes_part: false,
        };
        let (server, peer) = (added.server, added.peer.clone());
        async move {
            let time = cluster.options.deadline;
            let joined =
                ask(cluster, &peer, "Join", time, async { peer.training().join(join).await }).await?;
            cluster.keeps(server, joined.tier);
            ask(cluster, &peer, "Begin", time, async { peer.training().begin(begin).await }).await
        }
    };
    join_all(added.iter().map(begin)).await.into_iter().collect::<Result<Vec<_>>>()?;
    Ok(added.iter().map(|added| added.peer.address.clone()).collect())
}

/// Calls a server that is no member of the job yet. The call is not repeated, since the whole plan is tried again.
async fn ask<T>(
    cluster: &Cluster,
    peer: &Peer,
    call: &'static str,
    time: Duration,
    answer: impl Future<Output = std::result::Result<Response<T>, Status>>,
) -> Result<T> {
    let late = |_| Fault::new(FaultKind::Deadline, call, "unanswered", "answered", "see that server's log");
    let answer = host::timeout(time, answer).await.map_err(late);
    let answer = answer.and_then(|answer| answer.map_err(|status| fault_from_status(&status, &peer.address)));
    let failed = |fault| CallFailed {
        server: peer.address.clone(),
        job: cluster.job().clone(),
        call,
        step: None,
        fault,
    };
    Ok(answer.map_err(failed)?.into_inner())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_on_drives_gains_no_more_shards_than_its_record_can_name() {
        let target = Placement::striped(vec!["a:1".into(), "b:1".into()], 10);
        let moves = [(ShardId(1), ServerId(1))];
        let refused = check_gains(&target, &moves, 4).unwrap_err();
        assert_eq!((&*refused.field, &*refused.value), ("shards", "5 of server b:1"));
        assert_eq!((check_gains(&target, &moves, 5), check_gains(&target, &[], 4)), (Ok(()), Ok(())));
    }
}
