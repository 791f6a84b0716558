//! Waits that ended without their result.

use std::{fmt, time::Duration};

use longshore_proto::{Fault, FaultKind, JobName, ShardId, Step, Version};

use super::call::at;

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
