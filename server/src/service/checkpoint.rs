//! Checkpoint, SealCheckpoint, DiscardCheckpoint and ListCheckpoints.

use std::sync::Arc;

use longshore_engine::{
    checkpoint::{Listed, Part},
    step::Phase,
};
use longshore_proto::{Fault, Incarnation, JobName, Rank, Version};
use longshore_wire::{Author, v1};
use tokio::time::Instant;

use super::{
    Services, blocking, default_deadline,
    room::{Kept, Room},
};
use crate::jobs::JobHandle;

impl Services {
    pub(super) async fn write_checkpoint(
        &self,
        request: &v1::CheckpointRequest,
        author: Author,
        room: &Room,
    ) -> Result<Kept<v1::CheckpointResponse>, Fault> {
        if request.check {
            let (store, handle) = (self.store()?, self.jobs.get(&request.job)?);
            blocking(move || store.check_room(&handle.job)).await?;
            return room.make(default_deadline(), || Ok(v1::CheckpointResponse::default())).await;
        }
        let name = JobName::parse("name", &request.name)?;
        let (store, handle) = (self.store()?, self.jobs.get(&request.job)?);
        check_author(&handle, author)?;
        let job = Arc::clone(&handle.job);
        let expected = (request.version > 0).then_some(Version(request.version));
        let deadline = default_deadline().into_std();
        let written = blocking(move || store.write(id(author), &job, name.as_str(), expected, deadline));
        let failed = |fault: &Fault| handle.checkpoints.failed(&request.job, &request.name, fault);
        let part = written.await.inspect_err(failed)?;
        let answer = || Ok(v1::CheckpointResponse { version: part.version.0, part: part.to_json()? });
        room.make(default_deadline(), answer).await
    }

    pub(super) async fn seal(
        &self,
        request: v1::SealCheckpointRequest,
        author: Author,
    ) -> Result<v1::SealCheckpointResponse, Fault> {
        let job = JobName::parse("job", &request.job)?;
        let name = JobName::parse("name", &request.name)?;
        // The author is checked if the job is open here. After a drain a checkpoint may be sealed before the job is
        // opened again.
        if let Ok(handle) = self.jobs.get(&request.job) {
            check_author(&handle, author)?;
        }
        let (store, keep, parts) = (self.store()?, self.checkpoint_keep, request.parts);
        let turn = self.folders.take(&job).await?;
        let sealed = blocking(move || {
            let _turn = turn;
            let sealed = store.seal(&job, name.as_str(), &parts)?;
            store.prune(&job, keep, name.as_str());
            Ok(sealed)
        });
        let sealed = sealed.await;
        // A checkpoint of a job that is not open here may be sealed too, but no status keeps the result.
        if let Ok(handle) = self.jobs.get(&request.job) {
            match &sealed {
                Ok(sealed) => handle.checkpoints.sealed(&request.name, sealed.version),
                Err(fault) => handle.checkpoints.failed(&request.job, &request.name, fault),
            }
        }
        let sealed = sealed?;
        Ok(v1::SealCheckpointResponse {
            manifest: sealed.path.display().to_string(),
            parts: sealed.parts,
            visible_parts: sealed.visible,
        })
    }

    pub(super) async fn discard(
        &self,
        request: v1::DiscardCheckpointRequest,
        author: Author,
    ) -> Result<v1::DiscardCheckpointResponse, Fault> {
        let name = JobName::parse("name", &request.name)?;
        let store = self.store()?;
        let handle = self.jobs.get(&request.job)?;
        check_author(&handle, author)?;
        blocking(move || {
            let job = &handle.job;
            let (number, count) = job.part();
            store.discard(id(author), &job.spec().name, name.as_str(), number, count)
        })
        .await?;
        Ok(v1::DiscardCheckpointResponse {})
    }

    /// Lists a job's checkpoints, for one call at a time, since a folder may have many.
    pub(super) async fn list(
        &self,
        job: &str,
        room: &Room,
    ) -> Result<Kept<v1::ListCheckpointsResponse>, Fault> {
        let store = self.store()?;
        let name = JobName::parse("job", job)?;
        let _turn = self.folders.take(&name).await?;
        let (found, parts) = blocking(move || Ok((store.list(&name)?, store.unsealed(&name)))).await?;
        let progress = self.jobs.get(job).ok().map(|handle| handle.job.progress());
        let reached = progress.filter(|progress| progress.phase != Phase::Loading);
        let reached = reached.map(|progress| progress.version);
        let answer = || {
            let checkpoints = found.iter().map(|listed| info(listed, reached)).collect();
            let unsealed = parts.iter().map(|(name, part)| unsealed(name.clone(), part));
            Ok(v1::ListCheckpointsResponse { checkpoints, unsealed: unsealed.collect::<Result<_, Fault>>()? })
        };
        // Without room the call is refused at once, and may be made again.
        room.make(Instant::now(), answer).await
    }
}

/// Refuses a rank 0 that a newer process has fenced.
fn check_author(handle: &JobHandle, author: Author) -> Result<(), Fault> {
    match author {
        Author::Rank(incarnation) => handle.job.protocol.check_newest(Rank(0), incarnation),
        Author::Operator(_) | Author::Unknown => Ok(()),
    }
}

fn id(author: Author) -> u64 {
    match author {
        Author::Unknown => 0,
        Author::Operator(number) | Author::Rank(Incarnation(number)) => number,
    }
}

fn unsealed(name: String, part: &Part) -> Result<v1::UnsealedPart, Fault> {
    let (server, servers, version) = (part.server, part.servers, part.version.0);
    Ok(v1::UnsealedPart { name, part: part.to_json()?, server, servers, version })
}

/// Converts a listed checkpoint. `reached` is the job's version; a checkpoint beyond it is stale
/// since a step back.
fn info(listed: &Listed, reached: Option<Version>) -> v1::CheckpointInfo {
    let beyond = reached.is_some_and(|version| listed.version > version);
    v1::CheckpointInfo {
        name: listed.name.clone(),
        version: listed.version.0,
        sequence: listed.sequence,
        parts: listed.parts,
        visible_parts: listed.visible.clone(),
        stale: listed.damage.is_none() && (listed.stale || beyond),
        damage: listed.damage.as_ref().map(|fault| fault.cut().to_string()).unwrap_or_default(),
        state_hash: listed.state_hash.clone().unwrap_or_default(),
    }
}
