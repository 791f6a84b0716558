//! Exports a job from all its servers at once. Called by a session, and by `longshore export` without one.

use std::time::Duration;

use futures_util::future::try_join_all;
use longshore_proto::{Fault, FaultKind, Step, Version};

use super::version::{TRIES, asked_version, has_passed};
use crate::{
    cluster::{Backoff, Cluster},
    error::{CallFailed, Error, Result},
    export::{Contents, Export, MOVED, Part, Sink, moved},
    host::Instant,
};

/// The exported version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExportedVersion {
    pub version: Version,
    /// Number of updates that made the version.
    pub applied: u64,
}

/// Passes one version to `sink`: the newest, or a version to come while training goes on. A second try passes
/// everything again.
pub(super) async fn export(
    cluster: &Cluster,
    contents: Contents,
    sink: &Sink<'_>,
) -> Result<ExportedVersion> {
    let (layout, deadline) = (&cluster.layout, cluster.options.deadline);
    let export = Export { job: cluster.job().as_str(), contents, layout, deadline };
    let plan = async |tried| {
        let answers = cluster.describe_all(false, deadline).await?;
        let version = Version(asked_version(answers.values(), tried));
        let part = |server| Part {
            server,
            address: cluster.address(server).to_string(),
            admin: cluster.peer(server).admin(),
            owned: cluster.owned_at(server, Step(version.0)),
        };
        Ok((version, cluster.servers().map(part).collect()))
    };
    let explain = |part: &Part, fault| cluster.explain(part.server, "Export", None, fault);
    export_by(&export, cluster.options.slow_deadline, plan, explain, sink).await
}

/// Passes the version of a `plan` to `sink`. A failed try leads to another plan if training went on, shards moved, or
/// a server was busy or gone. The plan gets the number of tries that training overtook. Tries end after
/// `slow_deadline`.
pub async fn export_by(
    export: &Export<'_>,
    slow_deadline: Duration,
    plan: impl AsyncFn(u32) -> Result<(Version, Vec<Part>)>,
    explain: impl Fn(&Part, Fault) -> Error,
    sink: &Sink<'_>,
) -> Result<ExportedVersion> {
    let (mut tried, mut backoff) = (0, Backoff::new());
    // Deadlines of the tries. `give_up` starts with the first of consecutive failures, `last` with the very first
    // failure.
    let (mut give_up, mut last) = (None, None);
    loop {
        let begun = Instant::now();
        let (failed_at, received) = match plan(tried).await {
            Ok((version, parts)) => {
                let received = receive(export, version, &parts, &explain, sink).await;
                (Instant::now(), received)
            }
            // A plan's failure counts from the plan's begin, since its calls may have waited for the deadline already.
            Err(error) => (begun, Err(error)),
        };
        match received {
            Err(Error::Call(failed)) if has_passed(&failed.fault) && tried < TRIES => tried += 1,
            Err(Error::Call(failed)) if passes(&failed) => {
                // An export that ran for long before it broke begins a new row of failures. `last` still ends the
                // tries: each try starts from the first byte, and a link may cut every stream.
                if failed_at.duration_since(begun) > export.deadline {
                    give_up = None;
                }
                let row = *give_up.get_or_insert(failed_at + export.deadline);
                let all = *last.get_or_insert(failed_at + slow_deadline);
                if !backoff.pause(row.min(all)).await {
                    return Err(Error::Call(failed));
                }
                tracing::debug!(error = %failed, "exporting again");
            }
            other => return other,
        }
    }
}

/// Returns true if a server was gone or busy with other exports, or if shards have moved.
fn passes(CallFailed { call, fault, .. }: &CallFailed) -> bool {
    match fault.kind {
        FaultKind::Unavailable => true,
        FaultKind::Exhausted => fault.field == "exports",
        FaultKind::Precondition => fault.field == MOVED,
        // The job has left the server. In a session this fault becomes another error, which ends the export.
        FaultKind::NotFound => fault.field == "job" && *call == "Export",
        _ => false,
    }
}

async fn receive(
    export: &Export<'_>,
    version: Version,
    parts: &[Part],
    explain: impl Fn(&Part, Fault) -> Error,
    sink: &Sink<'_>,
) -> Result<ExportedVersion> {
    let (owned, shards): (usize, _) =
        (parts.iter().map(|part| part.owned.len()).sum(), export.layout.shards());
    // A server may leave the job, or be given up, while the plan is made.
    if let Some(last) = parts.last().filter(|_| owned != shards as usize) {
        let fault = moved(format!("{owned} shards"), &format!("{shards}, each of one server"));
        return Err(explain(last, fault));
    }
    let explain = &explain;
    let from = |part| async move {
        let applied = export.receive(version, part, sink).await;
        applied.map_err(|fault| explain(part, fault))
    };
    // A server without shards may make no version any more.
    let owners = parts.iter().filter(|part| !part.owned.is_empty());
    let applied = try_join_all(owners.map(from)).await?;
    match applied.iter().find(|&&other| other != applied[0]) {
        None => Ok(ExportedVersion { version, applied: applied.first().copied().unwrap_or(0) }),
        Some(other) => {
            let remedy = "the servers were filled with different states: delete the job and fill it again";
            let value = format!("{} and {other}", applied[0]);
            Err(Fault::new(FaultKind::Conflict, "applied", value, "the same on every server", remedy).into())
        }
    }
}
