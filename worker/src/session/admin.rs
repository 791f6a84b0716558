//! Calls of operators over all servers of a job: hash, pause, delete.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::UNIX_EPOCH,
};

use longshore_proto::{
    FaultKind, ServerId, TierKind, Version,
    checksum::{self, BlockHash},
    limits::MAX_PAUSE_REASON_BYTES,
};
use longshore_wire::v1::{DeleteJobRequest, DescribeResponse, PauseRequest, ScaleRequest, Scaling};

use crate::{
    cluster::{Backoff, Cluster},
    error::{Error, MissingBlock, Result, VersionsDiffer},
    host::Instant,
    rank::RankState,
};

/// The hash of all state of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateHash {
    pub version: Version,
    /// Number of steps that updated.
    pub applied: u64,
    /// 32 hexadecimal digits.
    pub hash: String,
}

pub(super) async fn state_hash(cluster: &Cluster) -> Result<StateHash> {
    let start = Instant::now();
    let (mut differ_until, mut backoff) = (None, Backoff::new());
    loop {
        let answers = cluster.describe_all(true, cluster.options.slow_deadline).await?;
        let answers = answers.into_vec();
        let agree = answers.iter().all(|answer| answer.hash_version == answers[0].hash_version);
        let combined = agree.then(|| combine(cluster, &answers));
        if let Some(Ok(hash)) = combined {
            return Ok(hash);
        }
        // A single answer may take long, so the deadline begins with the first answers that do not fit. Servers of
        // different versions wait for rank 0, which may be gone. Blocks of a server that was given up come from
        // replicas once their servers know of the loss.
        let end = *differ_until.get_or_insert_with(|| Instant::now() + cluster.options.deadline);
        if !backoff.pause(end).await {
            if let Some(missing) = combined {
                return missing;
            }
            let versions = answers.iter().map(|answer| Version(answer.hash_version));
            return Err(VersionsDiffer {
                job: cluster.job().clone(),
                versions: cluster.addresses().zip(versions).collect(),
                waited: start.elapsed(),
            }
            .into());
        }
    }
}

fn combine(cluster: &Cluster, answers: &[DescribeResponse]) -> Result<StateHash> {
    let version = Version(answers[0].hash_version);
    let applied = answers[0].hash_applied;
    let mut blocks: Vec<Option<BlockHash>> = vec![None; cluster.layout.blocks() as usize];
    for hash in answers.iter().flat_map(|answer| &answer.hashes) {
        if let Some(slot) = blocks.get_mut(hash.block as usize) {
            *slot = hash.hash.as_ref().try_into().ok();
        }
    }
    if let Some(block) = blocks.iter().position(Option::is_none) {
        return Err(MissingBlock { job: cluster.job().clone(), block: block as u32, version }.into());
    }
    let hash = checksum::state_hash(version, applied, blocks.iter().flatten());
    Ok(StateHash { version, applied, hash })
}

/// Deletes the job on all servers. `again` is true if an earlier call may already have deleted the job.
pub(super) async fn delete_job(cluster: &Cluster, again: bool) -> Result<()> {
    cluster.on_all(|server| delete_job_on(cluster, server, again)).await?;
    Ok(())
}

pub(super) async fn delete_job_on(cluster: &Cluster, server: ServerId, again: bool) -> Result<()> {
    let request = DeleteJobRequest { job: cluster.job().to_string(), discard_unreadable: false };
    delete_by(cluster, server, request, again).await
}

/// Gives up the job's part on a server that lacks it, as when its drive is not mounted. Without this call the server
/// does not create the job in an empty folder.
pub(super) async fn give_up_on(cluster: &Cluster, server: ServerId) -> Result<()> {
    let request = DeleteJobRequest { job: cluster.job().to_string(), discard_unreadable: true };
    match delete_by(cluster, server, request, false).await {
        Err(Error::Call(failed)) if failed.fault.kind == FaultKind::NotFound => Ok(()),
        other => other,
    }
}

async fn delete_by(
    cluster: &Cluster,
    server: ServerId,
    request: DeleteJobRequest,
    again: bool,
) -> Result<()> {
    let attempts = AtomicUsize::new(usize::from(again));
    let deleted = cluster.call(server, "DeleteJob", None, cluster.options.deadline, |peer| {
        let request = request.clone();
        attempts.fetch_add(1, Ordering::Relaxed);
        async move { peer.admin().delete_job(request).await }
    });
    match deleted.await {
        // An attempt whose answer was lost has deleted the job.
        Err(Error::Call(failed))
            if failed.fault.kind == FaultKind::NotFound && attempts.load(Ordering::Relaxed) > 1 =>
        {
            Ok(())
        }
        deleted => deleted.map(|_| ()),
    }
}

/// Returns the time of a new wish: now, and later than every wish that servers have heard, since clocks differ. Rank 0 may
/// know of a wish from any server, and the latest one counts.
pub fn asked_after<'a>(known: impl Iterator<Item = &'a Scaling>) -> u64 {
    let newest = known.map(|scaling| scaling.asked_micros.max(scaling.reached_micros)).max();
    let now = UNIX_EPOCH.elapsed().map_or(1, |since| since.as_micros() as u64);
    now.max(newest.unwrap_or(0).saturating_add(1))
}

/// Gives every server of the job the wish for `servers`. Rank 0 then fulfils the wish with its decisions.
pub(super) async fn scale_all(
    cluster: &Cluster,
    servers: &[String],
    tier: Option<TierKind>,
    max_exposed: f64,
) -> Result<()> {
    let answers = cluster.describe_all(false, cluster.options.deadline).await?;
    let asked_micros = asked_after(answers.values().filter_map(|answer| answer.scaling.as_ref()));
    let (job, servers) = (cluster.job().to_string(), servers.to_vec());
    let tier = tier.map_or(0, TierKind::number);
    let request = &ScaleRequest { job, servers, asked_micros, max_exposed, tier, ..Default::default() };
    let scale = |server| {
        cluster.call(server, "Scale", None, cluster.options.deadline, move |peer| {
            let request = request.clone();
            async move { peer.admin().scale(request).await }
        })
    };
    cluster.on_all(scale).await?;
    Ok(())
}

pub(super) async fn pause_all(cluster: &Cluster, rank: &RankState, reason: &str) -> Result<()> {
    let mut reason = reason.to_string();
    reason.truncate(reason.floor_char_boundary(MAX_PAUSE_REASON_BYTES));
    let request = PauseRequest { job: cluster.job().to_string(), incarnation: rank.incarnation().0, reason };
    let request = &request;
    let pause = |server| {
        cluster.call(server, "Pause", None, cluster.options.deadline, move |peer| {
            let request = request.clone();
            async move { peer.training().pause(request).await }
        })
    };
    cluster.on_all(pause).await?;
    Ok(())
}
