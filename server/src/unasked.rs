//! Checkpoints written on drain, without a client. No client seals them: if servers share the folder, the last server
//! finds all parts and seals.

use std::{sync::Arc, time::Instant};

use longshore_engine::{checkpoint::Store, job::Job};
use longshore_proto::{Fault, FaultKind, Version};

/// Most checkpoints of one name, told apart by a number.
const MOST_NAMES: u32 = 100;

/// This server's part of a checkpoint.
pub(crate) struct Written {
    pub(crate) name: String,
    pub(crate) version: Version,
    /// Servers whose parts make the checkpoint.
    pub(crate) servers: u32,
}

/// Writes this server's part, under a name that begins with `why`. Blocks.
pub(crate) fn write(store: &Store, job: &Arc<Job>, why: &str, deadline: Instant) -> Result<Written, Fault> {
    let version = job.progress().version;
    let (name, part) = first_free(&format!("{why}-{:08}", version.0), |name| {
        store.write(job, name, Some(version), deadline)
    })?;
    Ok(Written { name, version, servers: part.servers })
}

/// Seals the checkpoint if all parts exist, and prunes old ones beyond `keep`. Returns whether it is sealed now.
pub(crate) fn seal(store: &Store, job: &Job, written: &Written, keep: Option<usize>) -> Result<bool, Fault> {
    let job = &job.spec().name;
    let sealed = store.seal_if_whole(job, &written.name, written.servers)?;
    if sealed {
        store.prune(job, keep, &written.name)?;
    }
    Ok(sealed)
}

/// Writes under `name`. If another state has taken it, as after a step back, writes under the first free of name.2,
/// name.3, ... Servers that share a folder find the same names taken.
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
