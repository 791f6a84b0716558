//! Every failure a worker can meet: one struct each, so that a caller can match on it, and each says what to do.
//!
//! All are `Clone`: a failure found in the background is kept and returned by every later call.

use std::{fmt, time::Duration};

use longshore_proto::{ChunkId, Contribution, Fault, FaultKind, JobName, ShardId, Step, TierKind, Version};

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The large ones are boxed, so that a `Result` stays small.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Invalid(#[from] Invalid),
    #[error(transparent)]
    Unreachable(#[from] Unreachable),
    #[error(transparent)]
    Call(Box<CallFailed>),
    #[error(transparent)]
    Refused(Box<ChunkRefused>),
    #[error(transparent)]
    StateLost(#[from] StateLost),
    #[error(transparent)]
    Fenced(Box<Fenced>),
    #[error(transparent)]
    Outdated(Box<Outdated>),
    #[error(transparent)]
    VersionsDiffer(#[from] VersionsDiffer),
    #[error(transparent)]
    NotRestored(Box<NotRestored>),
    #[error(transparent)]
    StateKept(Box<StateKept>),
    #[error(transparent)]
    NoCheckpoint(#[from] NoCheckpoint),
    #[error(transparent)]
    OtherCheckpoints(#[from] OtherCheckpoints),
    #[error(transparent)]
    TimedOut(Box<TimedOut>),
    #[error(transparent)]
    StillPaused(#[from] StillPaused),
    #[error(transparent)]
    Gradient(#[from] GradientError),
    #[error(transparent)]
    Shortage(#[from] Shortage),
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(transparent)]
    MissingBlock(#[from] MissingBlock),
    #[error(transparent)]
    Misuse(#[from] Misuse),
    #[error(transparent)]
    Environment(#[from] Environment),
}

macro_rules! boxed {
    ($($variant:ident($inner:ident)),*) => {
        $(impl From<$inner> for Error {
            fn from(error: $inner) -> Error {
                Error::$variant(Box::new(error))
            }
        })*
    };
}

boxed!(
    Call(CallFailed),
    Refused(ChunkRefused),
    Fenced(Fenced),
    Outdated(Outdated),
    NotRestored(NotRestored),
    StateKept(StateKept),
    TimedOut(TimedOut)
);

/// An option or argument that cannot be used; nothing was sent.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Invalid(pub Fault);

impl From<Fault> for Error {
    /// For faults found on this side, before anything is sent. A server's fault needs its address: `CallFailed`.
    fn from(fault: Fault) -> Error {
        Error::Invalid(Invalid(fault))
    }
}

#[derive(Clone, Debug, thiserror::Error)]
#[error(
    "server {server} cannot be reached: tried for {tried:.1?}, last: {cause}. Check that longshored runs there \
     (`longshore doctor`), that address and port are right and that no firewall is between, or raise the deadline"
)]
pub struct Unreachable {
    pub server: String,
    pub tried: Duration,
    pub cause: String,
}

/// A server answered a call with a fault, or the transport failed until the deadline.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{call} of job {job}{} on server {server} failed ({}): {fault}", at(.step, ""), .fault.kind.name())]
pub struct CallFailed {
    pub server: String,
    pub job: JobName,
    pub call: &'static str,
    pub step: Option<Step>,
    pub fault: Fault,
}

/// A gradient chunk was not stored; nothing changed on the server.
#[derive(Clone, Debug, thiserror::Error)]
#[error("server {server} refused {contribution}, {chunk} of job {job} ({}): {fault}", .fault.kind.name())]
pub struct ChunkRefused {
    pub server: String,
    pub job: JobName,
    pub contribution: Contribution,
    pub chunk: ChunkId,
    pub fault: Fault,
}

/// A server does not hold the job's state: it restarted with the `memory` tier, or without the folders that its state is in.
#[derive(Clone, Debug, thiserror::Error)]
#[error("server {server} lost the state of job {job}: {detail}. {}", Regain(*.tier))]
pub struct StateLost {
    pub server: String,
    pub job: JobName,
    pub tier: TierKind,
    pub detail: String,
}

/// What brings lost state back. Where it may still lie somewhere, nothing that would give up a step comes first.
struct Regain(TierKind);

impl fmt::Display for Regain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 == TierKind::Memory {
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

/// Where state that outlives a process may be; empty for the tier that does not.
struct Whereabouts(TierKind);

impl fmt::Display for Whereabouts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let question = match self.0 {
            TierKind::Memory => return Ok(()),
            TierKind::Shm => "has it the --shm-dir that it had, and has its host stayed up",
            TierKind::Nvme => "is the drive of its --state-dir mounted",
        };
        write!(
            f,
            "Tier {} outlives the server's process: {question}, and is it the server that had this place in --servers? \
             Start it again where its state is, and the job goes on. ",
            self.0
        )
    }
}

/// A newer process has taken this rank.
#[derive(Clone, Debug, thiserror::Error)]
#[error(
    "another process has joined job {job} as this rank on server {server}: {fault}. Only one process may run each \
     rank; stop this one, or give it another rank"
)]
pub struct Fenced {
    pub server: String,
    pub job: JobName,
    pub fault: Fault,
}

/// What this process holds of the job is of no use any more: a step that it built on was taken back, since a server lost it
/// together with a rank's process; or the job went on with what an earlier process of this rank had sent. Nothing is lost.
/// The process need not end: a new session, joined again, goes on from the servers' version as a new process would.
#[derive(Clone, Debug, thiserror::Error)]
#[error("what this process holds of job {job} is outdated (server {server}): {fault}")]
pub struct Outdated {
    pub server: String,
    pub job: JobName,
    pub fault: Fault,
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

/// A restore that some servers could do and not all: nothing has started, and those wait for weights as before.
#[derive(Clone, Debug, thiserror::Error)]
#[error(
    "the restore of job {job} was taken back on {}, where it waits for weights again{}: {cause}. Put that right, then \
     restore it again, as the workers' command with --resume does, or name another checkpoint with --resume-from",
    .undone.join(", "), Left(.left)
)]
pub struct NotRestored {
    pub job: JobName,
    /// Servers that had loaded their part.
    pub undone: Vec<String>,
    /// Servers that hold their part still, and why.
    pub left: Vec<(String, Error)>,
    pub cause: Error,
}

/// Going back to a checkpoint would delete state that servers hold, and nobody has said that it may.
#[derive(Clone, Debug, thiserror::Error)]
#[error(
    "{}nothing was deleted: job {job} holds state, {}. {}", Lacking(.lost), Listed(.holders), Word(self)
)]
pub struct StateKept {
    pub job: JobName,
    pub tier: TierKind,
    /// What it would go back to.
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

struct Word<'a>(&'a StateKept);

impl fmt::Display for Word<'_> {
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

/// A job whose state is gone, or was to be given up, and no checkpoint to go back to. Nothing was deleted.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{}there is no checkpoint to resume from: {}", Lacking(.lost), Instead(self))]
pub struct NoCheckpoint {
    pub job: JobName,
    pub tier: TierKind,
    /// Servers that have nothing of the job, where others hold state of it.
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

/// Servers read different contents under one checkpoint's name.
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

/// A wait reached its deadline.
#[derive(Clone, Debug, thiserror::Error)]
#[error(
    "waited {waited:.1?} for {what}{}{}{}{} of job {job}{}. See who waits for whom with `longshore status`, or raise \
     the deadline",
    at(.step, " at "), at(.shard, ", "), at(.version, ", "), On(.server), Last(.last)
)]
pub struct TimedOut {
    pub what: &'static str,
    pub server: Option<String>,
    pub job: JobName,
    pub step: Option<Step>,
    pub shard: Option<ShardId>,
    pub version: Option<Version>,
    pub waited: Duration,
    /// What the server said last, naming the rank and shard it waits for, or why it cannot be asked.
    pub last: Option<Fault>,
}

#[derive(Clone, Debug, thiserror::Error)]
#[error(
    "job {job} is still paused after {waited:.1?}: {reason}. `longshore resume` lets it go on; join again after that"
)]
pub struct StillPaused {
    pub job: JobName,
    pub reason: String,
    pub waited: Duration,
}

/// A gradient that does not match the layout.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GradientError {
    #[error(
        "there is no parameter {param}: the job has {params}; register parameters before opening the job"
    )]
    Unknown { param: usize, params: usize },
    #[error(
        "the gradient of {name} has {given} elements, the parameter has {expected}: push the whole gradient"
    )]
    Length { name: String, given: u64, expected: u64 },
    #[error(
        "the gradient of {name} was put twice in one micro-step: sum it first, a weight used twice is one parameter"
    )]
    Twice { name: String },
    #[error(
        "{missing} parameters have no gradient, the first is {name}: put zeros for parameters without a gradient"
    )]
    Missing { name: String, missing: usize },
}

/// An allocation or reservation beyond a memory budget.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{device} has no room for {field}: asked {asked} bytes, free {free} of a budget of {budget}: {remedy}"
)]
pub struct Shortage {
    pub device: String,
    pub field: String,
    pub asked: u64,
    pub free: u64,
    pub budget: u64,
    pub remedy: &'static str,
}

/// A device's driver failed, or there is none.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{device}: {call} failed: {cause}: {remedy}")]
pub struct DeviceError {
    pub device: String,
    pub call: &'static str,
    pub cause: String,
    pub remedy: &'static str,
}

#[derive(Clone, Debug, thiserror::Error)]
#[error(
    "no server sent a hash for block {block} of job {job} at {version}: the placement does not cover the layout. \
     Name all servers of the job"
)]
pub struct MissingBlock {
    pub job: JobName,
    pub block: u32,
    pub version: Version,
}

/// The library was called in the wrong order.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Misuse(pub &'static str);

/// This machine refused something the library needs.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{what} failed: {cause}: {remedy}")]
pub struct Environment {
    pub what: &'static str,
    pub cause: String,
    pub remedy: &'static str,
}

/// " at step 3", or nothing.
fn at<T: fmt::Display>(value: &Option<T>, lead: &str) -> String {
    let lead = if lead.is_empty() { ", " } else { lead };
    value.as_ref().map(|value| format!("{lead}{value}")).unwrap_or_default()
}

struct On<'a>(&'a Option<String>);

impl fmt::Display for On<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.as_ref().map_or(Ok(()), |server| write!(f, ", from server {server}"))
    }
}

struct Last<'a>(&'a Option<Fault>);

impl fmt::Display for Last<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(fault) = self.0 else { return Ok(()) };
        let lead = if fault.kind == FaultKind::Unavailable { "last" } else { "the server said" };
        write!(f, "; {lead}: {fault}")
    }
}

struct Left<'a>(&'a [(String, Error)]);

impl fmt::Display for Left<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|(server, error)| write!(f, ", and not on {server} ({error})"))
    }
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
