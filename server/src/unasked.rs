//! Checkpoints that no client asked for, written on drain. No client seals them either: where servers share the folder, the
//! last server finds all parts and seals.

use std::{sync::Arc, time::Instant};

use longshore_engine::{checkpoint::Store, job::Job};
use longshore_proto::{Fault, FaultKind, Version};

/// How many checkpoints may share a name, told apart by a number.
const MOST_NAMES: u32 = 100;

/// This server's part of one.
pub(crate) struct Written {
    pub(crate) name: String,
    pub(crate) version: Version,
    /// How many servers' parts make the checkpoint.
    pub(crate) servers: u32,
}

/// Writes this server's part, with a name that begins with `why`. Blocks.
pub(crate) fn write(store: &Store, job: &Arc<Job>, why: &str, deadline: Instant) -> Result<Written, Fault> {
    let version = job.progress().version;
    let (name, part) = first_free(&format!("{why}-{:08}", version.0), |name| {
        store.write(job, name, Some(version), deadline)
    })?;
    Ok(Written { name, version, servers: part.servers })
}

/// Seals it where all parts are there, and removes checkpoints beyond those to keep. Returns whether it is sealed now.
pub(crate) fn seal(store: &Store, job: &Job, written: &Written, keep: Option<usize>) -> Result<bool, Fault> {
    let job = &job.spec().name;
    let sealed = store.seal_if_whole(job, &written.name, written.servers)?;
    if sealed {
        store.prune(job, keep, &written.name)?;
    }
    Ok(sealed)
}

/// Writes under the name. Where another state has taken it, as after the job went back, it writes under the first of
/// name.2, name.3, ... that is free. Servers that share a folder find the same names taken.
fn first_free<T>(name: &str, mut write: impl FnMut(&str) -> Result<T, Fault>) -> Result<(String, T), Fault> {
    let mut number = 1;
    loop {
        let numbered = if number == 1 { name.to_string() } else { format!("{name}.{number}") };
        number += 1;
        match write(&numbered) {
            Err(fault) if fault.kind == FaultKind::Conflict && number <= MOST_NAMES => {}
            written => return written.map(|written| (numbered, written)),
        }
    }
}
