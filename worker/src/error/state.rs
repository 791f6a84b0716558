//! A job's state is lost, of different versions, or would have to be deleted. Each error says what exists, where,
//! and how the state comes back.

use std::{fmt, time::Duration};

use longshore_proto::{JobName, Lifetime, TierKind, Version, fault::DELETED};

/// A server does not hold the job's state: it restarted with the `memory` tier, or without the folders of that
/// state. Or the job was deleted.
#[derive(Clone, Debug, thiserror::Error)]
#[error("server {server} lost the state of job {job}: {detail}{}", WayOn(self))]
pub struct StateLost {
    pub server: String,
    pub job: JobName,
    pub tier: TierKind,
    pub detail: String,
}

/// Names the ways to regain lost state, unless the server has said that the job was deleted and how to go on.
struct WayOn<'a>(&'a StateLost);

impl fmt::Display for WayOn<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.detail.contains(DELETED) {
            true => Ok(()),
            false => write!(f, ". {}", Regain(self.0.tier)),
        }
    }
}

/// Names the ways to regain lost state. If the state may still exist, remedies that lose a step come last.
struct Regain(TierKind);

impl fmt::Display for Regain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.0.properties().survives_restart() {
            return f.write_str(
                "Restore the last checkpoint (`longshore train --resume` or `longshore restore`), or delete the job and \
                 start again; the tiers `shm` and `nvme` survive a restart of the server",
            );
        }
        write!(
            f,
            "{}Only if that state is gone for good: --resume with --discard-state, or `longshore restore --discard-state`, \
             deletes what the other servers hold and goes back to the last checkpoint",
            Whereabouts(self.0)
        )
    }
}

/// Names the places of state that outlives a process. Empty for the `memory` tier, whose state does not.
struct Whereabouts(TierKind);

impl fmt::Display for Whereabouts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let question = match self.0.properties().lifetime {
            Lifetime::Process => return Ok(()),
            Lifetime::Host => "has it the --shm-dir that it had, and has its host stayed up",
            Lifetime::Drive => "is the drive of its --state-dir mounted",
        };
        write!(
            f,
            "Tier {} outlives the server's process: {question}, and is it the server that had this place in --servers? \
             Start it again where its state is, and the job goes on. ",
            self.0
        )
    }
}

#[derive(Clone, Debug, thiserror::Error)]
#[error(
    "the servers of job {job} hold different versions after {waited:.1?}: {}. Only rank 0 brings them together: start \
     it, or see its log if it runs. No step is lost before that", Listed(.versions)
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
     was begun with, or delete the job to start over", With(*.found), With(*.given)
)]
pub struct OtherFilling {
    pub server: String,
    pub job: JobName,
    /// The number of updates that made its state; 0 for weights alone.
    pub found: u64,
    pub given: u64,
}

struct With(u64);

impl fmt::Display for With {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => f.write_str("with weights alone"),
            applied => write!(f, "with the state after {applied} updates"),
        }
    }
}

/// Going back to a checkpoint would delete state that servers hold, and the caller has not allowed that.
#[derive(Clone, Debug, thiserror::Error)]
#[error(
    "{}nothing was deleted: job {job} holds state, {}. {}", Lacking(.lost), Listed(.holders), HowToGoBack(self)
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

struct Lacking<'a>(&'a [String]);

impl fmt::Display for Lacking<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            [] => Ok(()),
            lost => write!(f, "server {} lost its part, or never had it, and ", lost.join(" and server ")),
        }
    }
}

struct HowToGoBack<'a>(&'a StateKept);

impl fmt::Display for HowToGoBack<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let StateKept { tier, checkpoint, version, lost, .. } = self.0;
        if !lost.is_empty() {
            return write!(f, "{}, {checkpoint} of {version}", Regain(*tier));
        }
        write!(
            f,
            "With --discard-state it goes back to checkpoint {checkpoint} of {version}, and steps after that are lost"
        )
    }
}

/// There is no checkpoint to go back to, after the job's state was lost or was to be given up. Nothing was
/// deleted.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{}there is no checkpoint to resume from: {}", Lacking(.lost), Instead(self))]
pub struct NoCheckpoint {
    pub job: JobName,
    pub tier: TierKind,
    /// The servers without any state of the job, if others hold some.
    pub lost: Vec<String>,
    pub holders: Vec<(String, Version)>,
}

struct Instead<'a>(&'a NoCheckpoint);

impl fmt::Display for Instead<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let NoCheckpoint { job, tier, lost, holders } = self.0;
        if holders.is_empty() {
            return f.write_str("leave --resume out to start afresh");
        }
        write!(f, "nothing was deleted, and job {job} holds state, {}. ", Listed(holders))?;
        if !lost.is_empty() {
            write!(f, "{}", Whereabouts(*tier))?;
        }
        f.write_str("To give it up and start afresh: `longshore delete`, and leave --resume out")
    }
}

/// Servers read different contents under one checkpoint name.
#[derive(Clone, Debug, thiserror::Error)]
#[error(
    "checkpoint {checkpoint} of job {job} is not the same everywhere: {}. Nothing has started. Let the servers share one \
     checkpoint folder, or name another checkpoint", Listed(.versions)
)]
pub struct OtherCheckpoints {
    pub job: JobName,
    pub checkpoint: String,
    pub versions: Vec<(String, Version)>,
}

struct Listed<'a>(&'a [(String, Version)]);

impl fmt::Display for Listed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (server, version)) in self.0.iter().enumerate() {
            write!(f, "{}{server} at {version}", if index > 0 { ", " } else { "" })?;
        }
        Ok(())
    }
}
