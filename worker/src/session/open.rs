//! Opens a job on all servers. Distinguishes a fresh job, a running job and a job that lost a server's part.

use std::sync::atomic::Ordering::Relaxed;

use futures_util::future::join_all;
use longshore_proto::{
    Epoch, Fault, FaultKind, JobSpec, LeftOut, Placement, Rank, ServerId, Version, limits::PROTOCOL,
};
use longshore_wire::{
    Wire, left_outs_from_wire,
    v1::{DescribeRequest, DescribeResponse, JobProgress, OpenJobRequest, OpenJobResponse, Phase},
};

use super::admin::delete_job_on;
use crate::{
    cluster::{Backoff, ByServer, Cluster, whole},
    error::{Error, Result, StateLost},
    host::Instant,
};

/// The state of an opened job.
#[derive(Clone, Debug, PartialEq)]
pub enum Opened {
    /// Some server still waits for weights, so upload or restore them. Ranks other than 0 get `Fresh` for every state
    /// but `Running`: rank 0 alone restores and uploads.
    Fresh,
    /// A restore has begun and has not ended. `restore` of the same checkpoint continues it.
    Restoring { checkpoint: String },
    /// Every server has state. Versions may differ by a commit under way; `join` settles that.
    Running {
        /// The smallest of the servers' versions.
        version: Version,
        /// Number of updating steps on the server with the smallest version.
        applied: u64,
        /// The reason of a pause, if the job is paused.
        paused: Option<String>,
    },
}

impl Opened {
    pub fn is_fresh(&self) -> bool {
        matches!(self, Opened::Fresh)
    }
}

/// Opens the job on the servers that have it, and creates it on the others unless some server has trained. Beside a
/// trained part an absent part is a lost part, and creating it anew would hide the loss.
pub(super) async fn open(cluster: &Cluster) -> Result<Opened> {
    let (mut backoff, end) = (Backoff::new(), Instant::now() + cluster.options.deadline);
    loop {
        let there = cluster.on_all(|server| open_if_there(cluster, server)).await?;
        let absent = there.iter().filter(|(_, progress)| progress.is_none());
        let absent: Vec<ServerId> = absent.map(|(server, _)| server).collect();
        let has_trained = has_trained(cluster, there.values().flatten());
        if !absent.is_empty() && !has_trained {
            return judge_all(cluster, &open_everywhere(cluster).await?);
        }
        cluster.trained.fetch_or(has_trained, Relaxed);
        // If other servers have all shards, rank 0 gives up the servers without the job.
        if absent.is_empty() || cluster.placement().last_of(&absent).is_some() || !backoff.pause(end).await {
            let nothing = || JobProgress { phase: Phase::Loading.into(), ..JobProgress::default() };
            return judge_all(cluster, &there.map(|progress| progress.unwrap_or_else(nothing)));
        }
    }
}

/// Returns true if a server without the job has lost it. With replicas this is known even at version 0, once all other
/// servers are filled.
fn has_trained<'a>(cluster: &Cluster, mut present: impl Iterator<Item = &'a JobProgress>) -> bool {
    match cluster.spec().replicas {
        1 => present.any(|progress| progress.version > 0),
        _ => {
            let phases: Vec<Phase> = present.map(JobProgress::phase).collect();
            !phases.is_empty() && !phases.contains(&Phase::Loading)
        }
    }
}

/// Opens the job on all servers. If a server refuses, servers that have just created the job delete it. An empty part
/// would hinder a job on other servers.
pub(super) async fn open_everywhere(cluster: &Cluster) -> Result<ByServer<JobProgress>> {
    open_but_for(cluster, |_| false).await
}

/// Opens as `open_everywhere` does, but new parts stay if the refusal `is_expected`.
pub(super) async fn open_but_for(
    cluster: &Cluster,
    is_expected: impl Fn(&Error) -> bool,
) -> Result<ByServer<JobProgress>> {
    let answers = cluster.on_each(|server| open_on(cluster, server, false)).await;
    let is_refused = |error: &Error| match error {
        Error::Call(failed) => {
            !matches!(failed.fault.kind, FaultKind::Unavailable | FaultKind::Deadline) && !is_expected(error)
        }
        _ => false,
    };
    if answers.values().any(|answer| answer.as_ref().is_err_and(is_refused)) {
        for (server, answer) in answers.iter() {
            if answer.as_ref().is_ok_and(|answer| answer.created)
                && let Err(error) = delete_job_on(cluster, server, true).await
            {
                tracing::warn!(server = cluster.address(server), %error, "an empty part of a refused job stays");
            }
        }
    }
    let progress = |(server, answer): (_, Result<OpenJobResponse>)| {
        answer.map(|answer| (server, answer.progress.unwrap_or_default()))
    };
    answers.into_iter().map(progress).collect()
}

/// A server's part of the job.
pub(super) struct Part {
    /// Number of the server in `placement`, which is the placement that it has.
    number: ServerId,
    placement: Placement,
}

impl Part {
    /// Returns true if both may be parts of one job: some server has the same number in both.
    fn is_beside(&self, other: &Part) -> bool {
        let (ours, theirs) = (&self.placement, &other.placement);
        let is_same = |(ours, theirs): (&String, &String)| !ours.is_empty() && ours == theirs;
        ours.servers.iter().zip(&theirs.servers).any(is_same)
            && (ours.epoch != theirs.epoch || ours.same_owners(theirs).is_ok())
    }

    /// Returns true if the part's job has another number of servers than the session.
    fn is_elsewhere(&self, cluster: &Cluster) -> bool {
        self.placement.members().count() != cluster.servers().len() + cluster.given_up().len()
    }
}

/// Returns each server's part of the job. None for a server without the job.
pub(super) async fn parts(cluster: &Cluster) -> Result<ByServer<Option<Part>>> {
    cluster.on_all(|server| part_on(cluster, server)).await
}

async fn part_on(cluster: &Cluster, server: ServerId) -> Result<Option<Part>> {
    if find(cluster, server).await?.is_none() {
        return Ok(None);
    }
    let request = DescribeRequest { job: cluster.job().to_string(), ..Default::default() };
    let answer = cluster.call(server, "Describe", None, cluster.options.deadline, |peer| {
        let request = request.clone();
        async move { whole(peer.admin(), request).await }
    });
    // Another process may have deleted the job meanwhile.
    let Ok(answer) = answer.await else { return Ok(None) };
    let placement = Placement::from_wire(answer.placement).ok();
    Ok(placement.map(|placement| Part { number: ServerId(answer.server), placement }))
}

/// Returns the placement of a job that is open on another number of servers, and a server that knows it.
pub(super) fn elsewhere(cluster: &Cluster, parts: ByServer<Option<Part>>) -> Option<(ServerId, Placement)> {
    let mut parts = parts.into_iter().filter_map(|(server, part)| Some((server, part?)));
    let elsewhere = parts.find(|(_, part)| part.is_elsewhere(cluster));
    elsewhere.map(|(server, part)| (server, part.placement))
}

/// Refuses parts of several jobs of the name, parts in another order, and a part of a job on other servers.
///
/// # Errors
/// `Conflict` that names the first such part.
pub(super) async fn check_one_job(cluster: &Cluster, parts: &ByServer<Option<Part>>) -> Result<()> {
    let known = parts.iter().filter_map(|(server, part)| Some((server, part.as_ref()?)));
    let known: Vec<(ServerId, &Part)> = known.collect();
    for &(server, part) in &known {
        let is_in_place = part.is_elsewhere(cluster)
            || part.number == server && !is_held_by_others(cluster, parts, &part.placement).await;
        if is_in_place && part.is_beside(known[0].1) {
            continue;
        }
        let servers = part.placement.servers.join(",");
        let value =
            format!("{} on {} as {} of {servers}", cluster.job(), cluster.address(server), part.number);
        let limit = "parts of one job, in the order named";
        let remedy = "name that job's servers in their order, or servers without the job; --discard-state deletes what the \
                      named servers have of it";
        return Err(Fault::new(FaultKind::Conflict, "servers", value, limit, remedy).into());
    }
    Ok(())
}

/// Returns true if a server without the job stands in the place of another server, which has that part.
async fn is_held_by_others(cluster: &Cluster, parts: &ByServer<Option<Part>>, placement: &Placement) -> bool {
    let lacking = parts.iter().filter(|(_, part)| part.is_none()).map(|(server, _)| server);
    let held = lacking.map(async |server| match placement.servers.get(server.0 as usize) {
        Some(address) if address != cluster.address(server) => cluster.is_held_at(server, address).await,
        _ => false,
    });
    join_all(held).await.contains(&true)
}

/// Returns true if a server's part of the job is not complete yet.
pub fn is_loading(answer: &DescribeResponse) -> bool {
    answer.progress.as_ref().is_some_and(|progress| progress.phase() == Phase::Loading)
}

/// Returns the number of updates that the job starts from, and the parameters that had fewer.
pub(super) async fn filled(cluster: &Cluster) -> Result<(u64, Vec<LeftOut>)> {
    let answers = cluster.describe_all(false, cluster.options.deadline).await?;
    let progress = answers.into_vec().into_iter().filter_map(|answer| answer.progress);
    let first = progress.min_by_key(|progress| progress.applied).unwrap_or_default();
    Ok((first.applied, left_outs_from_wire(first.left_out)))
}

/// Returns the job's progress on a server; None if the job is not open there.
pub(super) async fn find(cluster: &Cluster, server: ServerId) -> Result<Option<JobProgress>> {
    match cluster.describe(server, false, cluster.options.deadline).await {
        Ok(answer) => Ok(Some(answer.progress.unwrap_or_default())),
        Err(Error::StateLost(_)) => Ok(None),
        Err(error) => Err(error),
    }
}

async fn open_if_there(cluster: &Cluster, server: ServerId) -> Result<Option<JobProgress>> {
    match find(cluster, server).await {
        Ok(None) => return Ok(None),
        Ok(Some(_)) => {}
        // The job is there and could not be recovered. Opening the job recovers it once more, and returns the reason of
        // a failure.
        Err(Error::Call(failed))
            if !matches!(failed.fault.kind, FaultKind::Unavailable | FaultKind::Deadline) => {}
        Err(error) => return Err(error),
    }
    match open_on(cluster, server, true).await {
        Ok(answer) => Ok(answer.progress),
        Err(Error::StateLost(_)) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Opens the job on a server. With `is_there`, a server that was restarted since and lacks the job does not begin an
/// empty part: rank 0 gives up a server without the job, and waits for one that is loading.
pub(super) async fn open_on(cluster: &Cluster, server: ServerId, is_there: bool) -> Result<OpenJobResponse> {
    // A job whose servers have changed may be in another tier than this rank was started with.
    let placement = cluster.placement();
    let has_moved = placement.epoch > Epoch(1);
    let tier = if has_moved { cluster.tier(server) } else { cluster.spec().tier };
    let spec = JobSpec { tier, ..cluster.spec().clone() };
    let request = OpenJobRequest {
        spec: Some(spec.to_wire()),
        placement: Some(placement.to_wire()),
        server: server.0,
        protocol: PROTOCOL,
        is_there,
        ..Default::default()
    };
    // Slow: a server allocates and touches all of its memory before it answers.
    let answer = cluster.call(server, "OpenJob", None, cluster.options.slow_deadline, |peer| {
        let request = request.clone();
        async move { peer.training().open_job(request).await }
    });
    answer.await
}

pub(super) fn judge_all(cluster: &Cluster, progress: &ByServer<JobProgress>) -> Result<Opened> {
    judge(cluster, &progress.iter().collect::<Vec<_>>())
}

/// Judges a job by its servers. If all servers are loading, the job is fresh; if all have state, the job is running. A
/// mixture beyond version 0 means that a server lost its part. At version 0 a mixture is an upload under way, since
/// servers begin to train one by one.
///
/// Rank 0 acts on this view; other ranks wait until all servers train.
pub(super) fn judge(cluster: &Cluster, servers: &[(ServerId, &JobProgress)]) -> Result<Opened> {
    let loading = servers.iter().find(|(_, progress)| progress.phase() == Phase::Loading);
    let ahead = servers.iter().find(|(_, progress)| progress.version > 0);
    let restore = servers.iter().find_map(|(_, progress)| progress.restore.as_ref());
    match (loading, ahead) {
        (Some(_), _) if cluster.options.rank != Rank(0) => Ok(Opened::Fresh),
        (Some(_), _) if restore.is_some() => {
            let checkpoint = restore.map(|restore| restore.name.clone()).unwrap_or_default();
            Ok(Opened::Restoring { checkpoint })
        }
        (Some(&(lost, _)), Some((ahead, progress))) => Err(StateLost {
            server: cluster.address(lost).into(),
            job: cluster.job().clone(),
            tier: cluster.tier(lost),
            detail: format!(
                "it holds nothing of it while server {} is at {}",
                cluster.address(*ahead),
                Version(progress.version)
            ),
        }
        .into()),
        (Some(_), None) => Ok(Opened::Fresh),
        (None, _) => {
            // `connect` refuses an empty list of servers.
            let progress = || servers.iter().map(|(_, progress)| *progress);
            let least = progress().min_by_key(|progress| progress.version).cloned().unwrap_or_default();
            let paused = progress().find(|progress| progress.phase() == Phase::Paused);
            Ok(Opened::Running {
                version: Version(least.version),
                applied: least.applied,
                paused: paused.map(|progress| progress.pause_reason.clone()),
            })
        }
    }
}
