//! Ends a pause on every server. A resume that reached only some servers is sent to the other servers too.

use std::time::Duration;

use futures_util::future::try_join_all;
use longshore_proto::{Fault, FaultKind, ServerId, Version};
use longshore_wire::v1::{JobProgress, Phase, ResumeRequest};

use crate::{
    cluster::{Backoff, ByServer, Cluster, Impatience, renewed},
    error::{Error, Result},
    host::{self, Instant},
    rank::version_when_running,
};

/// Returns the version that servers are paused at, or None. The lowest version counts, since a server past it has
/// been resumed.
pub fn paused_at<'a>(progress: impl IntoIterator<Item = &'a JobProgress>) -> Option<u64> {
    let paused = progress.into_iter().filter(|progress| progress.phase() == Phase::Paused);
    paused.map(|progress| progress.version).min()
}

fn is_behind(fault: &Fault) -> bool {
    fault.kind == FaultKind::Precondition && fault.field == "version"
}

pub(super) async fn resume_all(cluster: &Cluster, loss_scale: Option<f64>) -> Result<()> {
    let answers = cluster.describe_all(false, cluster.options.deadline).await?;
    let version = paused_at(answers.values().filter_map(|answer| answer.progress.as_ref())).map(Version);
    cluster.on_all(|server| resume_on(cluster, server, version, loss_scale.unwrap_or(0.0))).await?;
    Ok(())
}

/// Ends the pause that began at `version`, or the current pause. A `loss_scale` of 0 keeps the old scale. Waits
/// for a server that has lost the version in a crash.
pub(super) async fn resume_on(
    cluster: &Cluster,
    server: ServerId,
    version: Option<Version>,
    loss_scale: f64,
) -> Result<()> {
    let version = version.map(|version| version.0);
    let request = ResumeRequest { job: cluster.job().to_string(), loss_scale, version };
    let (mut end, mut backoff) = (Instant::now() + cluster.options.deadline, Backoff::new());
    loop {
        let asked = Instant::now();
        let answer = cluster.call(server, "Resume", None, cluster.options.deadline, |peer| {
            let request = request.clone();
            async move { peer.admin().resume(request).await }
        });
        let answer = answer.await.map(|_| ());
        end = renewed(end, asked, cluster.options.deadline);
        let behind = matches!(&answer, Err(Error::Call(failed)) if is_behind(&failed.fault));
        if !behind || !backoff.pause(end).await {
            return answer;
        }
    }
}

/// Brings an operator's resume to a server that still pauses at `version`. Only an identity of role operator may
/// resume; without it the rank waits until the operator's command is repeated.
pub(crate) async fn spread_on(
    cluster: &Cluster,
    server: ServerId,
    version: Version,
    loss_scale: f64,
) -> Result<()> {
    /// The operator's own calls reach all servers within this time.
    const AT_ONCE: Duration = Duration::from_secs(1);
    if let Ok(running) = host::timeout(AT_ONCE, runs_at(cluster, server, version)).await {
        return running;
    }
    match resume_on(cluster, server, Some(version), loss_scale).await {
        Err(Error::Call(failed)) if failed.fault.kind == FaultKind::Forbidden => {
            let server_name = cluster.address(server);
            tracing::warn!(server = server_name, %version, "still paused: `longshore resume` did not reach it, repeat it");
            match cluster.patiently(runs_at(cluster, server, version)).await {
                Ok(running) => running,
                Err(Impatience::Failed(error)) => Err(error),
                Err(Impatience::Elapsed(_)) => Err(Error::Call(failed)),
            }
        }
        resumed => resumed,
    }
}

/// Waits until a server trains at `version` or later.
async fn runs_at(cluster: &Cluster, server: ServerId, version: Version) -> Result<()> {
    let mut backoff = Backoff::new();
    while version_when_running(cluster, server).await? < version {
        backoff.pause(Instant::now() + cluster.options.deadline).await;
    }
    Ok(())
}

/// Sends an operator's resume to the servers that it had not reached when its sender died. `progress` has all servers,
/// at one version. A server that trains at the version at which other servers are paused was resumed.
pub(super) async fn spread_resume(
    cluster: &Cluster,
    mut progress: ByServer<JobProgress>,
) -> Result<ByServer<JobProgress>> {
    let with_decision = |progress: &JobProgress| {
        let commit = progress.last_commit.as_ref();
        progress.phase() == Phase::Paused && commit.is_some_and(|commit| !commit.pause_reason.is_empty())
    };
    let running = progress.values().find(|progress| progress.phase() == Phase::Training);
    let Some(commit) = running.and_then(|running| running.last_commit.clone()) else {
        return Ok(progress);
    };
    let paused: Vec<ServerId> = progress.ids().filter(|&server| with_decision(&progress[server])).collect();
    let version = Version(commit.step);
    try_join_all(paused.iter().map(|&server| spread_on(cluster, server, version, commit.loss_scale))).await?;
    for server in paused {
        tracing::info!(server = cluster.address(server), %version, "resumed, as another server was");
        let answer = cluster.describe(server, false, cluster.options.deadline).await?;
        progress[server] = answer.progress.unwrap_or_default();
    }
    Ok(progress)
}
