//! Exports a job from all its servers at once, as one rank.

use longshore_proto::{Fault, FaultKind, Step, Version};

use super::version::{TRIES, asked_version, has_passed};
use crate::{
    cluster::{Backoff, Cluster},
    error::{Error, Result},
    export::{Contents, Export, Sink},
    host::Instant,
};

/// The exported version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExportedVersion {
    pub version: Version,
    /// Number of updates that made it.
    pub applied: u64,
}

/// Passes one version to `sink`: the newest, or a version to come while training goes on. A second try passes
/// everything again.
pub(super) async fn export(
    cluster: &Cluster,
    contents: Contents,
    sink: &Sink<'_>,
) -> Result<ExportedVersion> {
    let (mut tried, mut backoff) = (0, Backoff::new());
    // The ends of all tries: `give_up` of a row of failures, `last` of all of them.
    let (mut give_up, mut last) = (None, None);
    loop {
        let begun = Instant::now();
        let answers = cluster.describe_all(false, cluster.options.deadline).await?;
        let version = Version(asked_version(answers.values(), tried));
        match receive(cluster, contents, version, sink).await {
            Err(Error::Call(failed)) if has_passed(&failed.fault) && tried < TRIES => tried += 1,
            Err(Error::Call(failed)) if passes(&failed.fault) => {
                let now = Instant::now();
                // An export that ran for long before it broke begins a new row of failures. `last` still ends the
                // tries: a link may cut every stream before its end, and each try starts from the first byte.
                if begun.elapsed() > cluster.options.deadline {
                    give_up = None;
                }
                let row = *give_up.get_or_insert(now + cluster.options.deadline);
                let all = *last.get_or_insert(now + cluster.options.slow_deadline);
                if !backoff.pause(row.min(all)).await {
                    return Err(Error::Call(failed));
                }
                tracing::debug!(error = %failed, "exporting again");
            }
            other => return other,
        }
    }
}

/// Returns true if a server was gone, or had as many exports as it takes at once.
fn passes(fault: &Fault) -> bool {
    match fault.kind {
        FaultKind::Unavailable => true,
        FaultKind::Exhausted => fault.field == "exports",
        _ => false,
    }
}

async fn receive(
    cluster: &Cluster,
    contents: Contents,
    version: Version,
    sink: &Sink<'_>,
) -> Result<ExportedVersion> {
    let (layout, deadline) = (&cluster.layout, cluster.options.deadline);
    let export = Export { job: cluster.job().as_str(), version, contents, layout, deadline };
    let from_server = |server| {
        let (export, owned) = (&export, cluster.owned_at(server, Step(version.0)));
        async move {
            let admin = cluster.peer(server).admin();
            let received = export.receive(cluster.address(server), admin, &owned, sink).await;
            received.map_err(|fault| cluster.explain(server, "Export", None, fault))
        }
    };
    let applied = cluster.on_all(from_server).await?.into_vec();
    match applied.iter().find(|&&other| other != applied[0]) {
        None => Ok(ExportedVersion { version, applied: applied.first().copied().unwrap_or(0) }),
        Some(other) => {
            let remedy = "the servers were filled with different states: delete the job and fill it again";
            let value = format!("{} and {other}", applied[0]);
            Err(Fault::new(FaultKind::Conflict, "applied", value, "the same on every server", remedy).into())
        }
    }
}
