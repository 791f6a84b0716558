//! Restore. Each of its modes is one act, which a client may repeat.

use std::sync::Arc;

use longshore_engine::checkpoint::{RestoreInfo, Store};
use longshore_proto::{Fault, FaultKind, JobName};
use longshore_wire::{self as wire, Wire, v1};
use tokio::time::Instant;

use super::{
    Services, blocking, convert, default_deadline,
    room::{Kept, Room},
};
use crate::jobs::{Act, JobHandle, Stage};

/// A Restore call after its first checks.
struct Restore {
    store: Arc<Store>,
    job: JobName,
    name: String,
    deadline: Instant,
}

impl Services {
    pub(super) async fn restore_job(
        &self,
        request: &v1::RestoreRequest,
        room: &Room,
    ) -> Result<Kept<v1::RestoreResponse>, Fault> {
        let restore = Restore {
            store: self.store()?,
            job: JobName::parse("job", &request.job)?,
            name: JobName::parse("name", &request.name)?.to_string(),
            deadline: Instant::now() + wire::deadline(request.deadline_ms)?,
        };
        let open = match self.jobs.get(&request.job) {
            Err(fault) if fault.kind == FaultKind::NotFound && fault.field == "job" => None,
            handle => Some(handle?),
        };
        let mode = mode(request.mode)?;
        if mode == v1::RestoreMode::Check {
            return restore.check(open, room).await;
        }
        let handle = open.map_or_else(|| self.jobs.get(&request.job), Ok)?;
        match mode {
            v1::RestoreMode::Check => unreachable!("answered above"),
            v1::RestoreMode::Release => restore.release(&handle, room).await,
            v1::RestoreMode::Verify => restore.verify(&handle, room).await,
            v1::RestoreMode::Hold | v1::RestoreMode::Whole => {
                self.draining.refuse()?;
                let held = restore.hold(&handle).await?;
                if mode == v1::RestoreMode::Hold {
                    return answer(Some(&handle), &held, room).await;
                }
                restore.start(&handle, held, room).await
            }
        }
    }
}

fn mode(value: i32) -> Result<v1::RestoreMode, Fault> {
    v1::RestoreMode::try_from(value).map_err(|_| {
        let remedy = "use a value of this server's protocol version";
        Fault::invalid("mode", value, "a named enum value", remedy)
    })
}

impl Restore {
    async fn check(
        self,
        open: Option<Arc<JobHandle>>,
        room: &Room,
    ) -> Result<Kept<v1::RestoreResponse>, Fault> {
        let job = open.as_ref().map(|handle| Arc::clone(&handle.job));
        let (info, spec) = blocking(move || self.store.check(job.as_deref(), &self.job, &self.name)).await?;
        let spec = open.as_ref().map_or(&spec, |handle| handle.job.spec());
        let answer =
            || Ok(v1::RestoreResponse { spec: Some(spec.to_wire()), ..restored(open.as_ref(), &info) });
        room.make(self.deadline, answer).await
    }

    async fn verify(self, handle: &Arc<JobHandle>, room: &Room) -> Result<Kept<v1::RestoreResponse>, Fault> {
        let (job, store, from, name) =
            (Arc::clone(&handle.job), Arc::clone(&self.store), self.job.clone(), self.name.clone());
        let verify = move || store.verify(&job, &from, &name);
        let info = handle.restores.run(self.act(Stage::Verify), self.deadline, verify).await?;
        answer(Some(handle), &info, room).await
    }

    async fn hold(&self, handle: &Arc<JobHandle>) -> Result<RestoreInfo, Fault> {
        let (job, store, from, name) =
            (Arc::clone(&handle.job), Arc::clone(&self.store), self.job.clone(), self.name.clone());
        let hold = move || store.hold(&job, &from, &name, default_deadline().into_std());
        handle.restores.run(self.act(Stage::Hold), self.deadline, hold).await
    }

    async fn start(
        self,
        handle: &Arc<JobHandle>,
        held: RestoreInfo,
        room: &Room,
    ) -> Result<Kept<v1::RestoreResponse>, Fault> {
        let job = Arc::clone(&handle.job);
        // The act continues even if the caller is gone.
        let start = move || {
            job.start_held(&held.id)?;
            Ok(held)
        };
        let info = handle.restores.run(self.act(Stage::Start), self.deadline, start).await?;
        tracing::info!(job = %self.job, name = self.name, version = info.version.0, "checkpoint restored");
        answer(Some(handle), &info, room).await
    }

    async fn release(self, handle: &Arc<JobHandle>, room: &Room) -> Result<Kept<v1::RestoreResponse>, Fault> {
        handle.job.cancel_load();
        handle.restores.end(&self.act(Stage::Hold), self.deadline).await?;
        let job = Arc::clone(&handle.job);
        blocking(move || job.release()).await?;
        tracing::info!(job = %self.job, "what was loaded from a checkpoint is given up");
        let answer = || {
            let progress = Some(convert::progress(handle.job.progress()));
            Ok(v1::RestoreResponse { progress, ..Default::default() })
        };
        room.make(default_deadline(), answer).await
    }

    fn act(&self, stage: Stage) -> Act {
        Act { checkpoint: self.name.clone(), stage }
    }
}

async fn answer(
    open: Option<&Arc<JobHandle>>,
    info: &RestoreInfo,
    room: &Room,
) -> Result<Kept<v1::RestoreResponse>, Fault> {
    room.make(default_deadline(), || Ok(restored(open, info))).await
}

fn restored(open: Option<&Arc<JobHandle>>, info: &RestoreInfo) -> v1::RestoreResponse {
    v1::RestoreResponse {
        progress: open.map(|handle| convert::progress(handle.job.progress())),
        version: info.version.0,
        applied: info.applied,
        state_hash: info.state_hash.clone().unwrap_or_default(),
        id: info.id.clone(),
        spec: None,
    }
}
