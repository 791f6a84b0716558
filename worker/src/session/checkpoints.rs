//! Checkpoints over all servers of a job: checks room, writes and seals, chooses names, and merges the servers' lists.
//! Called by a session on its caller's thread.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use longshore_proto::{Fault, FaultKind, JobName, Version};
use longshore_wire::{
    Author,
    v1::{
        CheckpointInfo, CheckpointRequest, CheckpointResponse, DiscardCheckpointRequest,
        ListCheckpointsRequest, ListCheckpointsResponse, SealCheckpointRequest, SealCheckpointResponse,
        UnsealedPart,
    },
};

use super::version::{TRIES, asked_version, has_passed, is_busy};
use crate::{
    cluster::{Backoff, Cluster},
    error::{Error, Result, TimedOut},
    host::Instant,
};

/// Returns one list of the checkpoints of all servers. Also seals complete checkpoints of drained servers without a
/// shared folder: such servers do not see each other's parts. Each server has `deadline` to answer.
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

/// Writes a checkpoint under `name`. A name that belongs to another state gets the first free number, as name.2.
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
    if let Err(Error::Call(_) | Error::TimedOut(_)) = &written {
        discard(cluster, author, name.as_str()).await;
    }
    written
}

async fn write_and_seal(cluster: &Cluster, author: Author, name: &str) -> Result<Checkpoint> {
    let start = Instant::now();
    let end = start + cluster.options.slow_deadline;
    let mut tried = 0;
    let mut backoff = Backoff::new();
    loop {
        match try_write_and_seal(cluster, author, name, tried).await {
            Err(Error::Call(failed)) if is_busy(&failed.fault) => {
                if !backoff.pause(end).await {
                    return Err(Error::Call(failed));
                }
            }
            // A commit was decided meanwhile: the named version is no longer the current one, or the job has other
            // servers.
            Err(Error::Call(failed)) if has_passed(&failed.fault) => {
                tried += 1;
                if tried == TRIES || Instant::now() > end {
                    return Err(moving_target(cluster, start, failed.fault));
                }
            }
            other => return other,
        }
    }
}

async fn try_write_and_seal(cluster: &Cluster, author: Author, name: &str, tried: u32) -> Result<Checkpoint> {
    let parts = parts(cluster, author, name, tried).await?;
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

/// Frees the room of written parts, since some part is missing. A server that does not answer keeps its part until two
/// later checkpoints are sealed. A server that recovers the job is not waited for.
async fn discard(cluster: &Cluster, author: Author, name: &str) {
    let request = DiscardCheckpointRequest { job: cluster.job().to_string(), name: name.to_string() };
    let discard = |server| {
        let (request, patience) = (&request, (cluster.options.deadline, Duration::ZERO));
        cluster.call_for(server, "DiscardCheckpoint", None, patience, move |peer| {
            let request = author.sign(request.clone());
            async move { peer.admin().discard_checkpoint(request).await }
        })
    };
    for (server, discarded) in cluster.on_each(discard).await {
        let Err(error) = discarded else { continue };
        let (job, server) = (cluster.job(), cluster.address(server));
        match &error {
            Error::Call(failed)
                if matches!(failed.fault.kind, FaultKind::Unavailable | FaultKind::Deadline) =>
            {
                tracing::warn!(%job, name, server, %error, "a part without a manifest may remain on this server");
            }
            // The checkpoint has failed for the same reason.
            _ => tracing::debug!(%job, name, server, %error, "an unsealed part was not removed"),
        }
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

/// A sealed checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checkpoint {
    pub name: String,
    /// The checkpoint's version. For a damaged checkpoint, the version that its manifest still seems to name.
    pub version: Version,
    /// True if every server sees all parts. With a folder per server, only the same servers can restore the checkpoint.
    /// Other servers need all parts in one folder.
    pub shared: bool,
    /// True if the job has gone back to an older checkpoint since.
    pub stale: bool,
    /// The reason why this checkpoint cannot be restored, with the server. None without known damage.
    pub damage: Option<String>,
}

/// The most checkpoints that share a name, told apart by a number.
const MOST_NAMES: u32 = 100;

/// Returns the default name of a checkpoint, such as `step-00000300`.
pub fn checkpoint_name(version: u64) -> String {
    format!("step-{version:08}")
}

/// Returns the name and its alternatives, for names that belong to another state: name.2, name.3 and so on.
pub fn numbered(name: &str) -> impl Iterator<Item = String> + use<> {
    let name = name.to_string();
    (1..=MOST_NAMES).map(move |number| match number {
        1 => name.clone(),
        _ => format!("{name}.{number}"),
    })
}

/// Returns the unsealed checkpoints that have every server's part, by name, with the parts in the order of the
/// servers.
pub(crate) fn unsealed_but_whole<'a>(
    parts: impl Iterator<Item = &'a UnsealedPart>,
) -> Vec<(String, Vec<String>)> {
    let mut found: BTreeMap<(&str, u64, u32), BTreeMap<u32, &str>> = BTreeMap::new();
    for unsealed in parts {
        let of = (unsealed.name.as_str(), unsealed.version, unsealed.servers);
        found.entry(of).or_default().insert(unsealed.server, &unsealed.part);
    }
    let whole = found.into_iter().filter(|((.., servers), parts)| parts.len() as u32 == *servers);
    let owned = |((name, ..), parts): ((&str, u64, u32), BTreeMap<u32, &str>)| {
        (name.to_string(), parts.into_values().map(str::to_string).collect())
    };
    whole.map(owned).collect()
}

/// Returns the checkpoints in the order of their sealing. A checkpoint that a server lacks or lists differently is
/// returned as damaged, with the reason.
pub fn common(lists: Vec<(String, Vec<CheckpointInfo>)>) -> Vec<Checkpoint> {
    let mut found: Vec<&CheckpointInfo> = Vec::new();
    for info in lists.iter().flat_map(|(_, list)| list) {
        if found.iter().all(|known| known.name != info.name) {
            found.push(info);
        }
    }
    found.sort_by_key(|info| info.sequence);
    found.into_iter().map(|info| one(&info.name, &lists)).collect()
}

fn one(name: &str, lists: &[(String, Vec<CheckpointInfo>)]) -> Checkpoint {
    let named = |list: &'_ Vec<CheckpointInfo>| list.iter().position(|info| info.name == name);
    let seen: Vec<(&str, Option<&CheckpointInfo>)> =
        (lists.iter()).map(|(server, list)| (server.as_str(), named(list).map(|at| &list[at]))).collect();
    let infos = || seen.iter().filter_map(|(_, info)| *info);
    let sound = infos().find(|info| info.damage.is_empty());
    Checkpoint {
        name: name.to_string(),
        version: Version(sound.or(infos().next()).map_or(0, |info| info.version)),
        shared: seen.iter().all(|(_, info)| info.is_some_and(sees_all)),
        stale: infos().any(|info| info.stale),
        damage: damage(&seen),
    }
}

fn sees_all(info: &CheckpointInfo) -> bool {
    info.visible_parts.len() == info.parts as usize
}

fn damage(seen: &[(&str, Option<&CheckpointInfo>)]) -> Option<String> {
    let broken = |(server, info): &(&str, Option<&CheckpointInfo>)| {
        let damage = &info.filter(|info| !info.damage.is_empty())?.damage;
        Some(format!("on {server}: {damage}"))
    };
    if let Some(broken) = seen.iter().find_map(broken) {
        return Some(broken);
    }
    if let Some((server, _)) = seen.iter().find(|(_, info)| info.is_none()) {
        return Some(format!(
            "it is not in the checkpoint folder of {server}: let the servers share one folder, or copy it there"
        ));
    }
    let (first, info) = seen.first().and_then(|(server, info)| Some((*server, (*info)?)))?;
    let hash = |info: &CheckpointInfo| (!info.state_hash.is_empty()).then(|| info.state_hash.clone());
    let differs = |other: &CheckpointInfo| {
        let hashes = hash(info).zip(hash(other));
        (other.version, other.parts) != (info.version, info.parts)
            || hashes.is_some_and(|(one, other)| one != other)
    };
    if let Some((server, _)) = seen.iter().find(|(_, other)| other.is_some_and(differs)) {
        return Some(format!("{first} and {server} have different ones of this name"));
    }
    let visible: BTreeSet<u32> =
        seen.iter().filter_map(|(_, info)| *info).flat_map(|info| info.visible_parts.clone()).collect();
    let lost = (0..info.parts).find(|part| !visible.contains(part))?;
    Some(format!("the part of server {} of {} is in no server's folder", lost + 1, info.parts))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(name: &str, sequence: u64, visible: &[u32]) -> CheckpointInfo {
        CheckpointInfo {
            name: name.into(),
            version: 10 * sequence,
            sequence,
            parts: 2,
            visible_parts: visible.to_vec(),
            ..Default::default()
        }
    }

    fn of(lists: [Vec<CheckpointInfo>; 2]) -> Vec<Checkpoint> {
        common(["a:1".to_string(), "b:1".to_string()].into_iter().zip(lists).collect())
    }

    #[test]
    fn folders_of_each_host_make_one_list() {
        let list =
            of([vec![info("x", 1, &[0]), info("y", 2, &[0])], vec![info("x", 1, &[1]), info("y", 2, &[1])]]);
        assert_eq!(list.iter().map(|known| &*known.name).collect::<Vec<_>>(), ["x", "y"]);
        assert!(list.iter().all(|known| known.damage.is_none() && !known.shared), "{list:?}");
        let shared = of([vec![info("x", 1, &[0, 1])], vec![info("x", 1, &[0, 1])]]);
        assert!(shared[0].shared && shared[0].damage.is_none());
    }

    #[test]
    fn what_one_server_lacks_is_damaged_and_says_where() {
        let damaged = CheckpointInfo { damage: "cut short".into(), ..info("x", 1, &[]) };
        let list = of([vec![info("x", 1, &[0, 1]), info("z", 3, &[0])], vec![damaged, info("y", 2, &[1])]]);
        let said: Vec<_> =
            list.iter().map(|known| (&*known.name, known.damage.as_deref().unwrap_or_default())).collect();
        assert_eq!(said[0], ("x", "on b:1: cut short"));
        assert!(said[1].0 == "y" && said[1].1.contains("of a:1"), "{said:?}");
        assert!(said[2].0 == "z" && said[2].1.contains("of b:1"), "{said:?}");
        let lost = of([vec![info("x", 1, &[0])], vec![info("x", 1, &[0])]]);
        assert!(lost[0].damage.as_ref().is_some_and(|said| said.contains("server 2 of 2")), "{lost:?}");
        let other = CheckpointInfo { version: 11, ..info("x", 1, &[1]) };
        let differ = of([vec![info("x", 1, &[0])], vec![other]]);
        assert!(differ[0].damage.as_ref().is_some_and(|said| said.contains("different")), "{differ:?}");
    }

    #[test]
    fn a_name_that_is_taken_gets_a_number() {
        assert_eq!(numbered("step").take(3).collect::<Vec<_>>(), ["step", "step.2", "step.3"]);
    }
}
