//! Failures about a job's state: lost, of different versions, or to be deleted. Each error names the remaining state,
//! its servers, and the way back.

use std::time::Duration;

use longshore_proto::{JobName, Lifetime, TierKind, Version, fault::DELETED};

use super::Error;

/// A server lacks the job's state. The server restarted with tier `memory` or without its folders, or the job was
/// deleted.
#[derive(Clone, Debug, thiserror::Error)]
#[error("server {server} lost the state of job {job}: {detail}{}", way_on(self))]
pub struct StateLost {
    pub server: String,
    pub job: JobName,
    pub tier: TierKind,
    pub detail: String,
}

/// Names the ways to regain lost state. Empty if the server's answer names them, as for a deleted job.
fn way_on(StateLost { tier, detail, .. }: &StateLost) -> String {
    if detail.contains(DELETED) { String::new() } else { format!(". {}", regain(*tier)) }
}

/// Names the ways to regain lost state. If the state may still exist, remedies that lose a step come last.
fn regain(tier: TierKind) -> String {
    if !tier.properties().survives_restart() {
        return "Restore the last checkpoint (`longshore train --resume` or `longshore restore`), or delete the job and \
                start again; the tiers `shm` and `nvme` survive a restart of the server"
            .into();
    }
    format!(
        "{}Only if that state is gone for good: --resume with --discard-state, or `longshore restore --discard-state`, \
         deletes what the other servers hold and goes back to the last checkpoint",
        whereabouts(tier)
    )
}

/// Names the places of state that outlives a process. Empty for the `memory` tier, whose state does not.
fn whereabouts(tier: TierKind) -> String {
    let question = match tier.properties().lifetime {
        Lifetime::Process => return String::new(),
        Lifetime::Host => "has it the --shm-dir that it had, and has its host stayed up",
        Lifetime::Drive => "is the drive of its --state-dir mounted",
    };
    format!(
        "Tier {tier} outlives the server's process: {question}, and is it the server that had this place in --servers? \
         Start it again where its state is, and the job goes on. "
    )
}

#[derive(Clone, Debug, thiserror::Error)]
#[error(
    "the servers of job {job} hold different versions after {waited:.1?}: {}. Only rank 0 brings them together: start \
     it, or see its log if it runs. No step is lost before that", listed(.versions)
)]
pub struct VersionsDiffer {
    pub job: JobName,
    pub versions: Vec<(String, Version)>,
    pub waited: Duration,
}

/// A server's state differs from the filling of this process: an earlier process began with another filling.
#[derive(Clone, Debug, thiserror::Error)]
#[error(
    "server {server} holds job {job} as it was filled {}, and this process fills it {}: load the state again that the job \
     was begun with, or delete the job to start over", with(*.found), with(*.given)
)]
pub struct OtherFilling {
    pub server: String,
    pub job: JobName,
    /// The number of updates that made the server's state; 0 for weights alone.
    pub found: u64,
    pub given: u64,
}

fn with(applied: u64) -> String {
    match applied {
        0 => "with weights alone".into(),
        applied => format!("with the state after {applied} updates"),
    }
}

/// Going back to a checkpoint would delete state that servers hold, and the caller has not allowed that.
#[derive(Clone, Debug, thiserror::Error)]
#[error(
    "{}nothing was deleted: job {job} holds state, {}. {}", lacking(.lost), listed(.holders), how_to_go_back(self)
)]
pub struct StateKept {
    pub job: JobName,
    pub tier: TierKind,
    /// The checkpoint that the job would go back to.
    pub checkpoint: String,
    pub version: Version,
    pub holders: Vec<(String, Version)>,
    pub lost: Vec<String>,
}

fn lacking(lost: &[String]) -> String {
    match lost {
        [] => String::new(),
        lost => format!("server {} lost its part, or never had it, and ", lost.join(" and server ")),
    }
}

fn how_to_go_back(StateKept { tier, checkpoint, version, lost, .. }: &StateKept) -> String {
    if !lost.is_empty() && tier.properties().survives_restart() {
        return format!("{}, {checkpoint} of {version}", regain(*tier));
    }
    format!(
        "With --discard-state it goes back to checkpoint {checkpoint} of {version}, and steps after that are lost"
    )
}

/// There is no checkpoint to go back to, after the job's state was lost or was to be given up. Nothing was
/// deleted.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{}there is no checkpoint to resume from: {}", lacking(.lost), instead(self))]
pub struct NoCheckpoint {
    pub job: JobName,
    pub tier: TierKind,
    /// The servers without any state of the job, if others hold some.
    pub lost: Vec<String>,
    pub holders: Vec<(String, Version)>,
}

fn instead(NoCheckpoint { job, tier, lost, holders }: &NoCheckpoint) -> String {
    if holders.is_empty() {
        return "train without --resume to start afresh".into();
    }
    format!(
        "nothing was deleted, and job {job} holds state, {}. {}To give it up and start afresh: `longshore delete --job={job}`, \
         and train without --resume",
        listed(holders),
        if lost.is_empty() { String::new() } else { whereabouts(*tier) }
    )
}

/// Servers read different contents under one checkpoint name.
#[derive(Clone, Debug, thiserror::Error)]
#[error(
    "checkpoint {checkpoint} of job {job} is not the same everywhere: {}. Nothing has started. Let the servers share one \
     checkpoint folder, or name another checkpoint", listed(.versions)
)]
pub struct OtherCheckpoints {
    pub job: JobName,
    pub checkpoint: String,
    pub versions: Vec<(String, Version)>,
}

fn listed(versions: &[(String, Version)]) -> String {
    let said: Vec<String> =
        versions.iter().map(|(server, version)| format!("{server} at {version}")).collect();
    said.join(", ")
}

/// Some servers could not do a restore. The other servers wait for weights again, and no server trains.
#[derive(Clone, Debug, thiserror::Error)]
#[error(
    "the restore of job {job} was taken back on {}, where it waits for weights again{}: {cause}. Put that right, then \
     restore it again, as the workers' command with --resume does, or name another checkpoint (--resume-from of train, \
     --name of restore)",
    .undone.join(", "), still_held(.left)
)]
pub struct NotRestored {
    pub job: JobName,
    /// The servers that had loaded their part.
    pub undone: Vec<String>,
    /// The servers that still hold their part, each with the reason.
    pub left: Vec<(String, Error)>,
    pub cause: Error,
}

fn still_held(servers: &[(String, Error)]) -> String {
    servers.iter().map(|(server, error)| format!(", and not on {server} ({error})")).collect()
}
