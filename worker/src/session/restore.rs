//! A restore as one act over all servers. Every server loads and holds its part. Once all hold their parts, all start.
//! After a fault, a lost answer or the client's death the job waits. The next attempt continues with the parts that are
//! held.

use std::time::Duration;

use futures_util::future::join_all;
use longshore_proto::{FaultKind, JobName, ServerId, Version};
use longshore_wire::v1::{Phase, RestoreMode, RestoreRequest, RestoreResponse};

use crate::{
    cluster::Cluster,
    error::{Error, NotRestored, OtherCheckpoints, Result},
    host::Instant,
};

/// The longest wait of one call on a server. Then the server's progress is read, and the wait goes on.
const ONE_WAIT: Duration = Duration::from_secs(10);

/// Fills the job from a checkpoint on every server, or on none. A job that is already at the checkpoint's state is
/// unchanged.
pub(super) async fn restore(cluster: &Cluster, name: &str) -> Result<Version> {
    let name = JobName::parse("checkpoint.name", name)?;
    let name = name.as_str();
    // Waits for every server: a server goes on loading whether its caller waits or not.
    let held = cluster.on_each(|server| restore_on(cluster, server, name, RestoreMode::Hold));
    let (mut loaded, mut failure) = (Vec::new(), None);
    for (server, answer) in held.await {
        match answer {
            Ok(answer) => loaded.push((server, answer)),
            Err(error) => failure = failure.or(Some(error)),
        }
    }
    let failure = failure.or_else(|| check_alike(cluster, name, &loaded).err());
    if let Some(cause) = failure {
        return Err(take_back(cluster, name, loaded, cause).await);
    }
    cluster.on_all(|server| restore_on(cluster, server, name, RestoreMode::Whole)).await?;
    Ok(loaded.first().map_or(Version(0), |(_, answer)| Version(answer.version)))
}

/// Returns the first server's description of a checkpoint, without reading its tensors. Fails if a server cannot
/// restore it.
pub(super) async fn check_checkpoint(cluster: &Cluster, name: &str) -> Result<RestoreResponse> {
    let answers = cluster.on_all(|server| restore_on(cluster, server, name, RestoreMode::Check)).await?;
    let mut answers: Vec<_> = answers.into_iter().collect();
    check_alike(cluster, name, &answers)?;
    // `connect` refuses an empty list of servers.
    Ok(answers.swap_remove(0).1)
}

/// Reads and checks all data that the servers need of a checkpoint. The job must be open on all of them.
pub(super) async fn verify_checkpoint(cluster: &Cluster, name: &str) -> Result<()> {
    cluster.on_all(|server| restore_on(cluster, server, name, RestoreMode::Verify)).await?;
    Ok(())
}

/// Runs one mode of a restore on one server, and waits as long as the server makes progress.
pub(super) async fn restore_on(
    cluster: &Cluster,
    server: ServerId,
    name: &str,
    mode: RestoreMode,
) -> Result<RestoreResponse> {
    let one_wait = ONE_WAIT.min(cluster.options.slow_deadline);
    let request = RestoreRequest {
        job: cluster.job().to_string(),
        name: name.into(),
        mode: mode.into(),
        deadline_ms: one_wait.as_millis() as u64,
    };
    let (mut since, mut shards) = (Instant::now(), 0);
    loop {
        let answer = cluster.call(server, "Restore", None, one_wait + cluster.options.deadline, |peer| {
            let request = request.clone();
            async move { peer.admin().restore(request).await }
        });
        let late = match answer.await {
            Err(Error::Call(failed)) if failed.fault.kind == FaultKind::Deadline => failed,
            other => return other,
        };
        let now = shards_restored(cluster, server).await;
        if now > shards {
            (since, shards) = (Instant::now(), now);
        } else if since.elapsed() >= cluster.options.slow_deadline {
            return Err(Error::Call(late));
        }
    }
}

async fn shards_restored(cluster: &Cluster, server: ServerId) -> u32 {
    let answer = cluster.describe(server, false, cluster.options.deadline).await;
    let progress = answer.ok().and_then(|answer| answer.progress?.restore);
    progress.map_or(0, |restore| restore.shards)
}

fn check_alike(cluster: &Cluster, name: &str, answers: &[(ServerId, RestoreResponse)]) -> Result<()> {
    if answers.iter().all(|(_, answer)| answer.id == answers[0].1.id) {
        return Ok(());
    }
    let of = |(server, answer): &(ServerId, RestoreResponse)| {
        (cluster.address(*server).to_string(), Version(answer.version))
    };
    let versions = answers.iter().map(of).collect();
    Err(OtherCheckpoints { job: cluster.job().clone(), checkpoint: name.into(), versions }.into())
}

/// Releases the parts that servers hold. After a failure that may pass, servers keep their parts, and the next attempt
/// continues with them.
async fn take_back(
    cluster: &Cluster,
    name: &str,
    loaded: Vec<(ServerId, RestoreResponse)>,
    cause: Error,
) -> Error {
    let holds = |answer: &RestoreResponse| {
        answer.progress.as_ref().is_some_and(|progress| progress.phase() == Phase::Loading)
    };
    let holding: Vec<ServerId> =
        loaded.iter().filter(|(_, answer)| holds(answer)).map(|(server, _)| *server).collect();
    if holding.is_empty() || may_pass(&cause) {
        return cause;
    }
    let release = |&server: &ServerId| restore_on(cluster, server, name, RestoreMode::Release);
    let released = join_all(holding.iter().map(release)).await;
    let (mut undone, mut left) = (Vec::new(), Vec::new());
    for (server, released) in holding.into_iter().zip(released) {
        let address = cluster.address(server).to_string();
        match released {
            Ok(_) => undone.push(address),
            Err(error) => left.push((address, error)),
        }
    }
    NotRestored { job: cluster.job().clone(), undone, left, cause }.into()
}

/// Returns true if a server that failed in this way may still succeed, or be at work.
pub(super) fn may_pass(error: &Error) -> bool {
    match error {
        Error::Call(failed) => matches!(failed.fault.kind, FaultKind::Deadline | FaultKind::Unavailable),
        _ => false,
    }
}
