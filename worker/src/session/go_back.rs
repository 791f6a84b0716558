//! Goes back to a checkpoint, for servers without the job's state, or with state that is to be given up.
//!
//! Nothing is deleted before every server is known to read a checkpoint. State that would survive a restart is
//! deleted only if the caller allows that.

use futures_util::future::{join_all, try_join_all};
use longshore_proto::{Fault, FaultKind, JobName, JobSpec, Rank, ServerId, ShardId, Version, fault::MOVED};
use longshore_wire::{
    Wire,
    v1::{JobProgress, Phase, RestoreMode, RestoreResponse},
};

use super::{
    admin::{delete_job_on, give_up_on},
    checkpoints::{Checkpoint, list_checkpoints},
    open::{Opened, elsewhere, find, judge, open_but_for, open_everywhere, parts},
    restore::{check_checkpoint, may_pass, restore, restore_on, verify_checkpoint},
};
use crate::{
    cluster::{Backoff, ByServer, Cluster},
    error::{Error, NoCheckpoint, Result, StateKept, StateLost, TimedOut},
    host::Instant,
};

const PASSED_OVER: &str =
    "A CHECKPOINT CANNOT BE RESTORED: going back to another one, and steps made after that one are lost";

/// The checkpoint to go back to, and the state that may be given up for it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GoBack {
    /// None means the newest restorable checkpoint, with a warning for each one that is passed over.
    pub checkpoint: Option<String>,
    /// True if state on servers may be deleted. If false, only state of tier `memory` is deleted, after another server
    /// lost its part.
    pub discard_state: bool,
}

/// The job's state, server by server.
struct Whereabouts {
    /// None for a server on which the job is not open.
    progress: ByServer<Option<JobProgress>>,
}

impl Whereabouts {
    fn has_state(progress: &Option<JobProgress>) -> bool {
        progress.as_ref().is_some_and(|progress| progress.phase() != Phase::Loading)
    }

    fn holders(&self) -> Vec<ServerId> {
        self.progress.ids().filter(|&server| Self::has_state(&self.progress[server])).collect()
    }

    fn version(&self, server: ServerId) -> Version {
        Version(self.progress[server].as_ref().map_or(0, |progress| progress.version))
    }
}

pub(super) async fn go_back(cluster: &Cluster, how: &GoBack) -> Result<Checkpoint> {
    let there = Whereabouts { progress: cluster.on_all(|server| find(cluster, server)).await? };
    let gone_back = go_back_from(cluster, &there, how).await;
    if there.progress.values().all(Option::is_none) && gone_back.as_ref().is_err_and(|error| !may_pass(error))
    {
        close_unfilled(cluster).await;
        return gone_back.map_err(|error| match error {
            Error::NotRestored(failed) => failed.cause,
            error => error,
        });
    }
    gone_back
}

/// Deletes the job on servers where this act has opened it and could not fill it. The empty job would keep its memory.
/// A failure here is ignored, since the caller returns the first error.
async fn close_unfilled(cluster: &Cluster) {
    let Ok(there) = cluster.on_all(|server| find(cluster, server)).await else { return };
    let there = Whereabouts { progress: there };
    if there.holders().is_empty() {
        let open = there.progress.ids().filter(|&server| there.progress[server].is_some());
        let _ = try_join_all(open.map(|server| discard_on(cluster, server))).await;
    }
}

async fn go_back_from(cluster: &Cluster, there: &Whereabouts, how: &GoBack) -> Result<Checkpoint> {
    let names = match &how.checkpoint {
        Some(name) => vec![JobName::parse("checkpoint.name", name)?.to_string()],
        None => names_newest_first(cluster).await?,
    };
    let mut newest = None;
    for (index, name) in names.iter().enumerate() {
        match go_back_to(cluster, name, there, how.discard_state).await {
            Err(error) if how.checkpoint.is_none() && is_unreadable(&error) => {
                if let Some(next) = names.get(index + 1) {
                    // A damaged manifest is listed by its file's time, so the next checkpoint may be newer.
                    tracing::warn!(checkpoint = name, %error, trying = next, "{PASSED_OVER}");
                }
                newest.get_or_insert(error);
            }
            other => return other,
        }
    }
    Err(newest.unwrap_or_else(|| {
        let (holders, lost) = holders_and_lost(cluster, there);
        let lost = if holders.is_empty() { Vec::new() } else { lost };
        NoCheckpoint { job: cluster.job().clone(), tier: cluster.tier(cluster.first()), lost, holders }.into()
    }))
}

/// Returns the checkpoint of a name, or else the newest whole one, after the damaged ones that are passed over for it.
/// `listed` begins with the oldest.
fn newest<'a>(
    listed: &'a [Checkpoint],
    name: Option<&str>,
) -> (impl Iterator<Item = &'a Checkpoint> + use<'a>, Option<&'a Checkpoint>) {
    let is_wanted = |found: &Checkpoint| name.map_or(found.damage.is_none(), |name| name == found.name);
    let at = listed.iter().rposition(is_wanted);
    let damaged = if name.is_none() { &listed[at.map_or(0, |at| at + 1)..] } else { &[] };
    (damaged.iter().rev(), at.map(|at| &listed[at]))
}

/// Chooses the checkpoint that brings a job from other servers to the session's servers. Changes nothing.
///
/// # Errors
/// `StateKept` if the other servers are past the checkpoint and their state may not be deleted; `NoCheckpoint`.
pub(super) async fn choose(cluster: &Cluster, how: &GoBack) -> Result<Checkpoint> {
    let there = Whereabouts { progress: cluster.on_all(|server| find(cluster, server)).await? };
    let listed = list_checkpoints(cluster, cluster.options.deadline).await?;
    let (passed_over, found) = newest(&listed, how.checkpoint.as_deref());
    // Other ranks ask again and again while rank 0 works.
    for Checkpoint { name, damage, .. } in passed_over.filter(|_| cluster.options.rank == Rank(0)) {
        let (trying, damage) = (found.map(|found| &found.name), damage.as_deref().unwrap_or_default());
        tracing::warn!(checkpoint = name, damage, ?trying, "{PASSED_OVER}");
    }
    let (holders, lost) = holders_and_lost(cluster, &there);
    let Some(found) = found.cloned() else {
        return Err(NoCheckpoint {
            job: cluster.job().clone(),
            tier: cluster.tier(cluster.first()),
            lost,
            holders,
        }
        .into());
    };
    // For a damaged checkpoint, this call names the fault.
    check_checkpoint(cluster, &found.name).await?;
    if !found.shared {
        let limit = "with every part in each server's checkpoint folder, as for any other number of servers";
        let remedy =
            "let the servers share a folder (--checkpoint-dir), or copy all parts into each server's";
        return Err(Fault::new(FaultKind::Precondition, "checkpoint", &found.name, limit, remedy).into());
    }
    if !how.discard_state && there.holders().iter().any(|&server| there.version(server) != found.version) {
        return Err(kept(cluster, &found, &there));
    }
    Ok(found)
}

/// Brings a job from the servers of `old` to the servers of `cluster`, by a checkpoint.
pub(super) async fn move_from(old: &Cluster, cluster: &Cluster, how: &GoBack) -> Result<Checkpoint> {
    let found = choose(cluster, how).await?;
    if !how.discard_state {
        // Every old server is asked again, also servers that the job leaves.
        let there = Whereabouts { progress: old.on_all(|server| find(old, server)).await? };
        let holders = there.holders();
        if holders.iter().any(|&server| there.version(server) != found.version) {
            return Err(kept(old, &found, &there));
        }
        // Another run may have reached the same version. Servers that train compare their state with the checkpoint's.
        let same = holders.iter().map(|&server| restore_on(old, server, &found.name, RestoreMode::Hold));
        match try_join_all(same).await {
            Err(error) if is_other_state(&error) => return Err(kept(old, &found, &there)),
            same => drop(same?),
        }
    }
    verify_checkpoint(old, &found.name).await?;
    tracing::info!(job = %cluster.job(), checkpoint = found.name, "a job goes to other servers");
    old.on_all(|server| discard_on(old, server)).await?;
    if how.discard_state {
        // A part of another job of the name would refuse this one.
        cluster.on_all(|server| discard_on(cluster, server)).await?;
    }
    open_again(cluster).await?;
    restore(cluster, &found.name).await?;
    Ok(found)
}

/// Waits until every server trains. Ranks other than 0 also wait while rank 0 opens the job, or replaces its state.
/// `how` tells how rank 0 may go back to a checkpoint. If rank 0 must refuse to go back, the wait ends at once.
pub(super) async fn wait_training(cluster: &Cluster, how: Option<&GoBack>) -> Result<()> {
    let start = Instant::now();
    let end = start + cluster.options.slow_deadline;
    let mut backoff = Backoff::new();
    loop {
        let there = cluster.on_all(|server| find(cluster, server)).await?;
        if let Some(absent) = there.find(Option::is_none)
            && cluster.options.rank == Rank(0)
        {
            let detail = "it is not open there any more".into();
            let server = cluster.address(absent).into();
            let (job, tier) = (cluster.job().clone(), cluster.tier(absent));
            return Err(StateLost { server, job, tier, detail }.into());
        }
        let known: Vec<_> =
            there.iter().filter_map(|(server, progress)| Some((server, progress.as_ref()?))).collect();
        let whole = known.len() == there.ids().len();
        let runs = matches!(judge(cluster, &known)?, Opened::Running { .. });
        if runs && whole {
            return Ok(());
        }
        let trains = |progress: &Option<JobProgress>| {
            progress.as_ref().is_some_and(|progress| progress.phase() != Phase::Loading)
        };
        if there.values().any(trains)
            && let Some(idle) = there.find(|progress| !trains(progress))
        {
            // A decision may have taken the job from that server since this rank connected.
            cluster.check_not_moved(cluster.address(idle)).await?;
        }
        // A rank 0 that goes back to a checkpoint may delete what such servers know of the job, and begin it there.
        if known.is_empty() && how.is_none() {
            check_not_left(cluster).await?;
        } else if runs && !known.is_empty() {
            check_coming(cluster, how).await?;
        }
        if !backoff.pause(end).await {
            return Err(not_training(cluster, &there, start));
        }
    }
}

/// Refuses servers without the job if one says that the job has left it. Rank 0 is refused there, too.
async fn check_not_left(cluster: &Cluster) -> Result<()> {
    let answers = join_all(cluster.servers().map(|server| cluster.glance(server))).await;
    let has_left = |error: &Error| matches!(error, Error::StateLost(lost) if lost.detail.contains(MOVED));
    answers.into_iter().filter_map(Result::err).find(has_left).map_or(Ok(()), Err)
}

/// Refuses, as rank 0 does, a job on other servers that cannot come to the session's servers.
async fn check_coming(cluster: &Cluster, how: Option<&GoBack>) -> Result<()> {
    let Some((server, theirs)) = elsewhere(cluster, parts(cluster).await?) else { return Ok(()) };
    match how {
        Some(how) => choose(cluster, how).await.map(drop),
        None => match theirs.same_owners(&cluster.placement()) {
            Err(fault) => Err(cluster.explain(server, "OpenJob", None, fault)),
            Ok(()) => Ok(()),
        },
    }
}

/// Returns an error that names the first server that does not train, and its progress.
fn not_training(cluster: &Cluster, there: &ByServer<Option<JobProgress>>, start: Instant) -> Error {
    let idle = |progress: &Option<JobProgress>| {
        progress.as_ref().is_none_or(|progress| progress.phase() == Phase::Loading)
    };
    let slow = there.find(idle).unwrap_or_default();
    let missing = there[slow].as_ref().and_then(|progress| progress.missing_shards.first());
    TimedOut {
        what: "rank 0 to open the job and to upload or restore its weights",
        server: Some(cluster.address(slow).into()),
        job: cluster.job().clone(),
        step: None,
        shard: missing.map(|&shard| ShardId(shard)),
        version: Some(Version(0)),
        waited: start.elapsed(),
        last: None,
    }
    .into()
}

async fn go_back_to(cluster: &Cluster, name: &str, there: &Whereabouts, discard: bool) -> Result<Checkpoint> {
    let known = check_checkpoint(cluster, name).await?;
    let version = Version(known.version);
    let checkpoint = Checkpoint { name: name.into(), version, shared: true, stale: false, damage: None };
    let holders = there.holders();
    if discard {
        let lost = there.progress.ids().filter(|&server| there.progress[server].is_none());
        try_join_all(lost.map(|server| give_up_on(cluster, server))).await?;
    }
    // Either a restore was cut off, or a part was lost at the checkpoint's own version. No state has to be given up.
    if holders.iter().all(|&server| there.version(server) == checkpoint.version) {
        match open_and_restore(cluster, name).await {
            Err(error)
                if !holders.is_empty()
                    && (is_other_state(&error) || is_other_spec(cluster, &known, &error)) => {}
            other => return other.map(|_| checkpoint),
        }
    }
    let has_ended = |server: ServerId| {
        let survives = cluster.tier(server).properties().survives_restart();
        !survives && !Whereabouts::has_state(&there.progress[server])
    };
    let gone = there.progress.ids().any(has_ended);
    if !gone && !discard {
        return Err(kept(cluster, &checkpoint, there));
    }
    // The open job that is given up may have another spec, in fields that a checkpoint leaves open. Servers
    // compare the checkpoint with their open job.
    let is_given_up = |error: &Error| !holders.is_empty() && is_other_spec(cluster, &known, error);
    match open_but_for(cluster, is_given_up).await {
        Err(error) if is_given_up(&error) => {}
        other => drop(other?),
    }
    verify_checkpoint(cluster, name).await?;
    for &server in &holders {
        let (server, version) = (cluster.address(server), there.version(server));
        tracing::info!(server, %version, "giving up a job's state for a checkpoint");
    }
    try_join_all(holders.iter().map(|&server| discard_on(cluster, server))).await?;
    open_again(cluster).await?;
    restore(cluster, name).await?;
    Ok(checkpoint)
}

async fn open_and_restore(cluster: &Cluster, name: &str) -> Result<Version> {
    open_everywhere(cluster).await?;
    restore(cluster, name).await
}

/// Opens the job again. Memory and folders of a deleted job are free once its last call has ended.
async fn open_again(cluster: &Cluster) -> Result<()> {
    // Set at the first refusal: the deadline leaves out the time in which servers read their drives.
    let mut end = None;
    let mut backoff = Backoff::new();
    loop {
        match open_everywhere(cluster).await {
            Err(Error::Call(failed))
                if matches!(failed.fault.kind, FaultKind::Exhausted | FaultKind::Conflict) =>
            {
                let end = *end.get_or_insert_with(|| Instant::now() + cluster.options.deadline);
                if !backoff.pause(end).await {
                    return Err(Error::Call(failed));
                }
            }
            other => return other.map(|_| ()),
        }
    }
}

/// Deletes the job on one server. A job that is gone counts as deleted, also if the first answer was lost.
async fn discard_on(cluster: &Cluster, server: ServerId) -> Result<()> {
    match delete_job_on(cluster, server, false).await {
        Err(Error::Call(failed)) if failed.fault.kind == FaultKind::NotFound => Ok(()),
        other => other,
    }
}

fn kept(cluster: &Cluster, checkpoint: &Checkpoint, there: &Whereabouts) -> Error {
    let (holders, lost) = holders_and_lost(cluster, there);
    StateKept {
        job: cluster.job().clone(),
        tier: cluster.tier(cluster.first()),
        checkpoint: checkpoint.name.clone(),
        version: checkpoint.version,
        holders,
        lost,
    }
    .into()
}

/// Returns the servers that hold state, each with its version, and the servers that have nothing.
fn holders_and_lost(cluster: &Cluster, there: &Whereabouts) -> (Vec<(String, Version)>, Vec<String>) {
    let address = |server| cluster.address(server).to_string();
    let holders = there.holders();
    let lost = cluster.servers().filter(|server| !holders.contains(server));
    let lost = lost.map(address).collect();
    (holders.into_iter().map(|server| (address(server), there.version(server))).collect(), lost)
}

/// Returns every checkpoint that any server lists: a partly readable checkpoint is not skipped in silence. The last
/// sealed comes first: after a job went back, versions do not tell which is newer.
async fn names_newest_first(cluster: &Cluster) -> Result<Vec<String>> {
    let listed = list_checkpoints(cluster, cluster.options.deadline).await?;
    Ok(listed.into_iter().rev().map(|checkpoint| checkpoint.name).collect())
}

/// Returns true if the checkpoint itself is at fault. Another checkpoint may then be whole.
fn is_unreadable(error: &Error) -> bool {
    match error {
        Error::Call(failed) => {
            let fault = &failed.fault;
            fault.field == "checkpoint" && matches!(fault.kind, FaultKind::Corrupt | FaultKind::NotFound)
        }
        Error::NotRestored(failed) => is_unreadable(&failed.cause),
        Error::OtherCheckpoints(_) => true,
        _ => false,
    }
}

/// Returns true if a server has the job open with another spec whose checkpoint may fill this job. A checkpoint
/// leaves open how many gradients make a step, and how the job is stored.
fn is_other_spec(cluster: &Cluster, known: &RestoreResponse, error: &Error) -> bool {
    let (Error::Call(failed), Ok(open)) = (error, JobSpec::from_wire(known.spec.clone())) else {
        return false;
    };
    let ours = cluster.spec();
    let of_open = JobSpec {
        world_size: ours.world_size,
        micro_steps: ours.micro_steps,
        partitions: open.partitions_as(ours),
        shard_elements: ours.shard_elements,
        tier: ours.tier,
        ..open
    };
    failed.fault.kind == FaultKind::Conflict && of_open.same_as(ours).is_ok()
}

/// Returns true if a server has state other than the checkpoint's.
fn is_other_state(error: &Error) -> bool {
    match error {
        Error::Call(failed) => {
            failed.fault.kind == FaultKind::Precondition && failed.fault.field == "job.phase"
        }
        Error::NotRestored(failed) => is_other_state(&failed.cause),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damaged_checkpoints_are_passed_over_by_name_for_the_newest_whole_one() {
        let of = |name: &str, damage: Option<&str>| Checkpoint {
            name: name.into(),
            version: Version(1),
            shared: true,
            stale: false,
            damage: damage.map(str::to_string),
        };
        let listed = [of("a", None), of("b", None), of("c", Some("cut short")), of("d", Some("lost"))];
        let found = |name| {
            let (passed_over, found) = newest(&listed, name);
            let names: Vec<&str> = passed_over.map(|of| &*of.name).collect();
            (names, found.map(|of| &*of.name))
        };
        assert_eq!(found(None), (vec!["d", "c"], Some("b")));
        assert_eq!(found(Some("a")), (vec![], Some("a")));
        assert_eq!(found(Some("x")), (vec![], None));
        assert_eq!(newest(&listed[2..], None).0.count(), 2);
    }
}
