//! A checkpoint requested under a name that is sealed already, as when a job went back and has come to that
//! step again. If the state is the same, it is that checkpoint. With another state the name is taken.

use std::{path::Path, sync::Arc, time::Instant};

use longshore_proto::{Fault, FaultKind, Version, limits::BLOCK_ELEMENTS};

use super::{
    manifest::Manifest,
    part::{Part, Table},
    read::PartReader,
};
use crate::job::Job;

/// Returns this server's part of the sealed checkpoint, if the part was made of the job's state.
pub(super) fn sealed_part(
    job: &Arc<Job>,
    folder: &Path,
    name: &str,
    expected: Option<Version>,
    deadline: Instant,
) -> Result<Part, Fault> {
    // A damaged checkpoint may not be overwritten either.
    let found = Manifest::read(folder).ok().and_then(|manifest| own_part(job, manifest));
    let part = found.filter(|part| expected.is_none_or(|version| version == part.version));
    let Some(part) = part else { return Err(taken(name)) };
    let Ok(reader) = PartReader::open(folder, &part) else { return Err(taken(name)) };
    let (info, hashes) = job.state_hashes(deadline)?;
    let blocks = part
        .shards
        .iter()
        .flat_map(|entry| (0..entry.elements / BLOCK_ELEMENTS).map(move |block| (entry.shard, block)));
    // Both lists are in the order of the flat space.
    let same = (info.version, info.applied) == (part.version, part.applied)
        && blocks.zip(&hashes).all(|((shard, block), (_, hash))| {
            reader.hash(Table::State, shard, block).is_ok_and(|sealed| sealed == *hash)
        });
    if !same {
        return Err(taken(name));
    }
    tracing::info!(job = %part.job, name, version = %part.version, "this state is sealed under this name already");
    Ok(part)
}

/// Returns the part that this server would write if nothing had changed since.
fn own_part(job: &Job, manifest: Manifest) -> Option<Part> {
    let servers = job.placement().servers.len() as u32;
    let mine = |part: &Part| {
        (part.server, part.servers) == (job.server().0, servers)
            && part.shards.iter().map(|entry| entry.shard).eq(job.owned().iter().copied())
    };
    // A job that was opened with another spec would write another part, whatever its state.
    if manifest.spec != *job.spec() {
        return None;
    }
    manifest.parts.into_iter().find(mine)
}

fn taken(name: &str) -> Fault {
    let remedy = "choose another name; sealed checkpoints are never overwritten";
    Fault::new(FaultKind::Conflict, "name", name, "not a sealed checkpoint's of another state", remedy)
}
