//! Checkpoints over all servers of a job: checks the room for one, writes and seals one, and lists them.

use std::time::{Duration, Instant};

use longshore_proto::{Fault, FaultKind, JobName, Version};
use longshore_wire::{
    Author,
    v1::{
        CheckpointRequest, CheckpointResponse, DiscardCheckpointRequest, ListCheckpointsRequest,
        ListCheckpointsResponse, SealCheckpointRequest, SealCheckpointResponse,
    },
};

use super::{
    checkpoints::{Checkpoint, common, numbered, unsealed_but_whole},
    version::{TRIES, asked_version, has_passed, is_busy},
};
use crate::{
    cluster::{Backoff, Cluster},
    error::{Error, Result, TimedOut},
};

/// Returns one list of the checkpoints of all servers. Also seals complete checkpoints of drained servers without
/// a shared folder: such servers cannot tell each other. Each server has `deadline` to answer.
pub(super) async fn list_checkpoints(cluster: &Cluster, deadline: Duration) -> Result<Vec<Checkpoint>> {
    let mut lists = listed(cluster, deadline).await?;
    let whole = unsealed_but_whole(lists.iter().flat_map(|list| &list.unsealed));
    for (name, parts) in &whole {
        if let Err(error) = seal(cluster, Author::Unknown, name, parts.clone()).await {
            tracing::debug!(job = %cluster.job(), name, %error, "parts of all servers were not sealed");
        }
    }
    if !whole.is_empty() {
        lists = listed(cluster, deadline).await?;
    }
    Ok(common(cluster.addresses().zip(lists.into_iter().map(|list| list.checkpoints)).collect()))
}

async fn listed(cluster: &Cluster, deadline: Duration) -> Result<Vec<ListCheckpointsResponse>> {
    let request = ListCheckpointsRequest { job: cluster.job().to_string() };
    let list = |server| {
        let request = &request;
        cluster.call(server, "ListCheckpoints", None, deadline, move |peer| {
            let request = request.clone();
            async move { peer.admin().list_checkpoints(request).await }
        })
    };
    Ok(cluster.on_all(list).await?.into_vec())
}

/// Checks that every server could write its part now.
pub(super) async fn check_room(cluster: &Cluster) -> Result<()> {
    let request = CheckpointRequest { job: cluster.job().to_string(), check: true, ..Default::default() };
    parts_of(cluster, Author::Unknown, &request).await?;
    Ok(())
}

/// Writes a checkpoint under `name`. If another state has taken that name, as after the job went back, the first
/// free name of name.2, name.3, ... is used.
pub(super) async fn checkpoint_numbered(cluster: &Cluster, author: Author, name: &str) -> Result<Checkpoint> {
    let mut names = numbered(name);
    loop {
        let Some(name) = names.next() else { return checkpoint(cluster, author, name).await };
        match checkpoint(cluster, author, &name).await {
            Err(Error::Call(failed)) if is_taken(&failed.fault) => {}
            written => return written,
        }
    }
}

pub(super) async fn checkpoint(cluster: &Cluster, author: Author, name: &str) -> Result<Checkpoint> {
    let name = JobName::parse("checkpoint.name", name)?;
    let written = write_and_seal(cluster, author, name.as_str()).await;
    match &written {
        // An unreachable server cannot discard its part either.
        Err(Error::Call(failed)) if failed.fault.kind == FaultKind::Unavailable => {}
        Err(Error::Call(_) | Error::TimedOut(_)) => discard(cluster, author, name.as_str()).await,
        _ => {}
    }
    written
}

async fn write_and_seal(cluster: &Cluster, author: Author, name: &str) -> Result<Checkpoint> {
    let start = Instant::now();
    let end = start + cluster.options.slow_deadline;
    let mut tried = 0;
    let mut backoff = Backoff::new();
    let parts = loop {
        match parts(cluster, author, name, tried).await {
            Err(Error::Call(failed)) if is_busy(&failed.fault) => {
                if !backoff.pause(end).await {
                    return Err(Error::Call(failed));
                }
            }
            // A commit came between, and the named version is no longer the current one.
            Err(Error::Call(failed)) if has_passed(&failed.fault) => {
                tried += 1;
                if tried == TRIES || Instant::now() > end {
                    return Err(moving_target(cluster, start, failed.fault));
                }
            }
            other => break other?,
        }
    };
    let version = Version(parts.first().map_or(0, |part| part.version));
    let sealed = seal(cluster, author, name, parts.into_iter().map(|part| part.part).collect()).await?;
    let shared = sealed.iter().all(|sealed| sealed.visible_parts == sealed.parts);
    Ok(Checkpoint { name: name.to_string(), version, shared, stale: false, damage: None })
}

/// Writes every server's part of one version: the newest, or a later one after more tries.
async fn parts(cluster: &Cluster, author: Author, name: &str, tried: u32) -> Result<Vec<CheckpointResponse>> {
    let answers = cluster.describe_all(false, cluster.options.deadline).await?;
    let request = CheckpointRequest {
        job: cluster.job().to_string(),
        name: name.into(),
        version: asked_version(answers.values(), tried),
        check: false,
    };
    parts_of(cluster, author, &request).await
}

/// Calls all servers, and waits for each: a server goes on writing whether its caller waits or not.
async fn parts_of(
    cluster: &Cluster,
    author: Author,
    request: &CheckpointRequest,
) -> Result<Vec<CheckpointResponse>> {
    let write = |server| {
        cluster.call(server, "Checkpoint", None, cluster.options.slow_deadline, move |peer| {
            let request = author.sign(request.clone());
            async move { peer.admin().checkpoint(request).await }
        })
    };
    cluster.on_each(write).await.into_vec().into_iter().collect()
}

async fn seal(
    cluster: &Cluster,
    author: Author,
    name: &str,
    parts: Vec<String>,
) -> Result<Vec<SealCheckpointResponse>> {
    let request = SealCheckpointRequest { job: cluster.job().to_string(), name: name.to_string(), parts };
    let seal = |server| {
        let request = &request;
        cluster.call(server, "SealCheckpoint", None, cluster.options.slow_deadline, move |peer| {
            let request = author.sign(request.clone());
            async move { peer.admin().seal_checkpoint(request).await }
        })
    };
    cluster.on_each(seal).await.into_vec().into_iter().collect()
}

/// Frees the room of written parts, since some part is missing. If that fails, the next sealed checkpoint frees
/// it.
async fn discard(cluster: &Cluster, author: Author, name: &str) {
    let request = DiscardCheckpointRequest { job: cluster.job().to_string(), name: name.to_string() };
    let discard = |server| {
        let request = &request;
        cluster.call(server, "DiscardCheckpoint", None, cluster.options.deadline, move |peer| {
            let request = author.sign(request.clone());
            async move { peer.admin().discard_checkpoint(request).await }
        })
    };
    for error in cluster.on_each(discard).await.into_vec().into_iter().filter_map(Result::err) {
        tracing::debug!(job = %cluster.job(), name, %error, "an unsealed part was not removed");
    }
}

fn moving_target(cluster: &Cluster, start: Instant, fault: Fault) -> Error {
    TimedOut {
        what: "a version that all servers can checkpoint",
        server: None,
        job: cluster.job().clone(),
        step: None,
        shard: None,
        version: None,
        waited: start.elapsed(),
        last: Some(fault),
    }
    .into()
}

/// Returns true if the name belongs to a sealed checkpoint of another state.
pub fn is_taken(fault: &Fault) -> bool {
    fault.kind == FaultKind::Conflict && fault.field == "name"
}
