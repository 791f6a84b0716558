//! Failures that a server answered with, or that come from an unreachable server.

use std::{fmt, time::Duration};

use longshore_proto::{ChunkId, Contribution, Fault, FaultKind, JobName, ShardId, Step, Version};

#[derive(Clone, Debug, thiserror::Error)]
#[error(
    "server {server} cannot be reached: tried for {tried:.1?}, last: {cause}. Check that longshored runs there \
     (`longshore doctor`), that address and port are right and that no firewall is between, or raise the deadline \
     (--deadline-s of train and export; deadline= in Python)"
)]
pub struct Unreachable {
    pub server: String,
    pub tried: Duration,
    pub cause: String,
}

/// A server and this process do not trust each other. Another attempt does not help.
#[derive(Clone, Debug, thiserror::Error)]
#[error("server {server}: {fault}")]
pub struct Untrusted {
    pub server: String,
    pub fault: Fault,
}

/// A server answered a call with a fault, or the transport failed until the deadline.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{call} of job {job}{} on server {server} failed ({}): {fault}", at(.step, ", "), .fault.kind.name())]
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

/// A newer process has taken this rank.
#[derive(Clone, Debug, thiserror::Error)]
#[error(
    "another process has joined job {job} as this rank, or another optimizer of this process with the same job=, and later than \
     this one, as server {server} says. Only one process may run each rank, with one optimizer: the newer one goes on. If both \
     were meant, give this one another rank or another job"
)]
pub struct Fenced {
    pub server: String,
    pub job: JobName,
    pub fault: Fault,
}

/// This process holds outdated data. The reason may be that a step was taken back, since a server and a rank's process
/// lost it together. The job may also have gone on with data of an earlier process of this rank.
///
/// Nothing is lost, and the process need not end: a new session that joins goes on from the servers' version.
#[derive(Clone, Debug, thiserror::Error)]
#[error("what this process holds of job {job} is outdated (server {server}): {fault}")]
pub struct Outdated {
    pub server: String,
    pub job: JobName,
    pub fault: Fault,
}

#[derive(Clone, Debug, thiserror::Error)]
#[error("no server sent a hash for block {block} of job {job} at {version}. Name all servers of the job")]
pub struct MissingBlock {
    pub job: JobName,
    pub block: u32,
    pub version: Version,
}

/// Formats a value after `lead`, as in " at step 3". Empty for None.
fn at<T: fmt::Display>(value: &Option<T>, lead: &str) -> String {
    value.as_ref().map(|value| format!("{lead}{value}")).unwrap_or_default()
}

/// A wait reached its deadline.
#[derive(Clone, Debug, thiserror::Error)]
#[error(
    "waited {waited:.1?} for {what}{}{}{}{} of job {job}{}. See who waits for whom with `longshore status`, or raise \
     the deadline (--deadline-s of train and export; deadline= in Python)",
    at(.step, " at "), at(.shard, ", "), at(.version, ", "), at(.server, ", from server "), last_word(.last)
)]
pub struct TimedOut {
    pub what: &'static str,
    pub server: Option<String>,
    pub job: JobName,
    pub step: Option<Step>,
    pub shard: Option<ShardId>,
    pub version: Option<Version>,
    pub waited: Duration,
    /// The server's last word: the rank and shard that it waits for, or why the server cannot be asked.
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

/// The caller interrupted the wait. The awaited event may still happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the wait was interrupted. Call again to go on waiting; a step of which a part was pushed cannot go on"
)]
pub struct Interrupted;

fn last_word(fault: &Option<Fault>) -> String {
    let is_unavailable = fault.as_ref().is_some_and(|fault| fault.kind == FaultKind::Unavailable);
    at(fault, if is_unavailable { "; last: " } else { "; the server said: " })
}
