//! Admin: list, describe, checkpoints, resume, delete, drain.

use std::{
    sync::Arc,
    time::{Duration, Instant, UNIX_EPOCH},
    vec::IntoIter,
};

use longshore_engine::{
    checkpoint::Store,
    step::{Phase, RankProgress},
    tier::Spill,
};
use longshore_proto::{Fault, FaultKind, Param, Version, limits::DEFAULT_DEADLINE_MS};
use longshore_wire::{
    self as wire, Author, Wire,
    v1::{self, admin_server::Admin},
};
use tonic::{Request, Response, Status};

use super::{Services, convert, default_deadline, export, permitted::permitted, refuse, stand};
use crate::{
    jobs::{Hashes, JobHandle},
    trust::Caller,
};

/// Returns the deadline of a snapshot's wait for updates already decided.
pub(super) fn snapshot_deadline() -> Instant {
    Instant::now() + Duration::from_millis(DEFAULT_DEADLINE_MS)
}

#[tonic::async_trait]
impl Admin for Services {
    async fn list_jobs(
        &self,
        request: Request<v1::ListJobsRequest>,
    ) -> Result<Response<v1::ListJobsResponse>, Status> {
        let caller = Caller::of(request.extensions()).map_err(|fault| refuse("ListJobs", "", fault))?;
        let jobs = self.jobs.names().into_iter().filter(|job| caller.sees(job)).collect();
        let budget = self.jobs.budget();
        let (memory_budget, memory_reserved) = (budget.total(), budget.reserved());
        let owners = self.jobs.owners().into_iter().filter(|(owner, _)| caller.sees_owner(&owner.name));
        let identities = owners.map(|(owner, usage)| convert::identity(owner, usage)).collect();
        Ok(Response::new(v1::ListJobsResponse {
            identities,
            jobs,
            memory_budget,
            memory_reserved,
            release: env!("CARGO_PKG_VERSION").into(),
            unix_micros: UNIX_EPOCH.elapsed().map_or(0, |since| since.as_micros() as u64),
        }))
    }

    async fn describe(
        &self,
        request: Request<v1::DescribeRequest>,
    ) -> Result<Response<v1::DescribeResponse>, Status> {
        let request = permitted(request)?;
        let answer = self.describe_job(&request).await.map(v1::DescribeResponse::fit);
        answer.map(Response::new).map_err(|fault| refuse("Describe", &request.job, fault))
    }

    type DescribeInPartsStream = tokio_stream::Iter<IntoIter<Result<v1::DescribeResponse, Status>>>;

    async fn describe_in_parts(
        &self,
        request: Request<v1::DescribeRequest>,
    ) -> Result<Response<Self::DescribeInPartsStream>, Status> {
        let request = permitted(request)?;
        let answer = self.describe_job(&request).await.map(v1::DescribeResponse::into_parts);
        let parts = answer.map_err(|fault| refuse("DescribeInParts", &request.job, fault))?;
        Ok(Response::new(tokio_stream::iter(parts.into_iter().map(Ok).collect::<Vec<_>>())))
    }

    async fn checkpoint(
        &self,
        request: Request<v1::CheckpointRequest>,
    ) -> Result<Response<v1::CheckpointResponse>, Status> {
        let author = Author::of(request.metadata());
        let request = permitted(request)?;
        let answer = self.write_checkpoint(&request, author).await;
        answer.map(Response::new).map_err(|fault| refuse("Checkpoint", &request.job, fault))
    }

    async fn seal_checkpoint(
        &self,
        request: Request<v1::SealCheckpointRequest>,
    ) -> Result<Response<v1::SealCheckpointResponse>, Status> {
        let author = Author::of(request.metadata());
        let request = permitted(request)?;
        let job = request.job.clone();
        let answer = self.seal(request, author).await;
        answer.map(Response::new).map_err(|fault| refuse("SealCheckpoint", &job, fault))
    }

    async fn discard_checkpoint(
        &self,
        request: Request<v1::DiscardCheckpointRequest>,
    ) -> Result<Response<v1::DiscardCheckpointResponse>, Status> {
        let author = Author::of(request.metadata());
        let request = permitted(request)?;
        let job = request.job.clone();
        let answer = self.discard(request, author).await;
        answer.map(Response::new).map_err(|fault| refuse("DiscardCheckpoint", &job, fault))
    }

    async fn list_checkpoints(
        &self,
        request: Request<v1::ListCheckpointsRequest>,
    ) -> Result<Response<v1::ListCheckpointsResponse>, Status> {
        let job = permitted(request)?.job;
        let answer = self.list(&job).await;
        answer.map(Response::new).map_err(|fault| refuse("ListCheckpoints", &job, fault))
    }

    async fn restore(
        &self,
        request: Request<v1::RestoreRequest>,
    ) -> Result<Response<v1::RestoreResponse>, Status> {
        let request = permitted(request)?;
        let answer = self.restore_job(&request).await;
        answer.map(Response::new).map_err(|fault| refuse("Restore", &request.job, fault))
    }

    type ExportStream = export::Messages;

    async fn export(
        &self,
        request: Request<v1::ExportRequest>,
    ) -> Result<Response<Self::ExportStream>, Status> {
        let caller = Caller::of(request.extensions()).map_err(|fault| refuse("Export", "", fault))?;
        let request = permitted(request)?;
        let job = request.job.clone();
        if request.state {
            caller.permit_state().map_err(|fault| refuse("Export", &job, fault))?;
        }
        let messages = export::start(self, request).map_err(|fault| refuse("Export", &job, fault))?;
        Ok(Response::new(messages))
    }

    async fn resume(
        &self,
        request: Request<v1::ResumeRequest>,
    ) -> Result<Response<v1::ResumeResponse>, Status> {
        let request = permitted(request)?;
        let answer = self.resume_job(&request).await;
        answer.map_err(|fault| refuse("Resume", &request.job, fault))?;
        tracing::info!(job = request.job, loss_scale = request.loss_scale, "job resumed");
        Ok(Response::new(v1::ResumeResponse {}))
    }

    async fn step_back(
        &self,
        request: Request<v1::StepBackRequest>,
    ) -> Result<Response<v1::StepBackResponse>, Status> {
        let request = permitted(request)?;
        let answer = self.step_job_back(&request).await;
        answer.map(Response::new).map_err(|fault| refuse("StepBack", &request.job, fault))
    }

    async fn delete_job(
        &self,
        request: Request<v1::DeleteJobRequest>,
    ) -> Result<Response<v1::DeleteJobResponse>, Status> {
        let v1::DeleteJobRequest { job, discard_unreadable } = permitted(request)?;
        let deleted = Arc::clone(&self.jobs).delete(&job, discard_unreadable).await;
        deleted.map_err(|fault| refuse("DeleteJob", &job, fault))?;
        tracing::info!(job, "job deleted");
        Ok(Response::new(v1::DeleteJobResponse {}))
    }

    async fn drain(
        &self,
        _request: Request<v1::DrainRequest>,
    ) -> Result<Response<v1::DrainResponse>, Status> {
        self.draining.begin();
        Ok(Response::new(v1::DrainResponse {}))
    }
}

impl Services {
    async fn describe_job(&self, request: &v1::DescribeRequest) -> Result<v1::DescribeResponse, Fault> {
        let handle = self.jobs.get(&request.job)?;
        let mut answer = self.describe_open(&handle, request.brief);
        answer.drive_endurance_bytes = self.drive_endurance;
        answer.checkpoints = handle.checkpoints.last();
        if let Some(after) = request.steps_after {
            answer.steps = handle.history.after(after).into_iter().map(convert::decided).collect();
        }
        // A job that waits for weights has no state yet.
        if request.state_hash && handle.job.progress().phase != Phase::Loading {
            let Hashes { info, blocks } = handle.hashes(default_deadline()).await?;
            answer.hash_version = info.version.0;
            answer.hash_applied = info.applied;
            answer.hashes = blocks
                .iter()
                .map(|(block, hash)| v1::BlockHash { block: block.0, hash: hash.to_vec().into() })
                .collect();
        }
        Ok(answer)
    }

    async fn resume_job(&self, request: &v1::ResumeRequest) -> Result<(), Fault> {
        let handle = self.jobs.get(&request.job)?;
        let (version, loss_scale) = (request.version.map(Version), request.loss_scale);
        stand(&handle, move |job| job.resume(version, loss_scale)).await
    }

    async fn step_job_back(&self, request: &v1::StepBackRequest) -> Result<v1::StepBackResponse, Fault> {
        self.draining.refuse()?;
        let (incarnation, version) =
            (wire::incarnation_from_wire(request.incarnation)?, Version(request.version));
        let handle = Arc::clone(&self.jobs).step_back(&request.job, incarnation, version).await?;
        Ok(v1::StepBackResponse { progress: Some(convert::progress(handle.job.progress())) })
    }

    pub(crate) fn store(&self) -> Result<Arc<Store>, Fault> {
        self.checkpoints.clone().ok_or_else(|| {
            let remedy = "start the server with --checkpoint-dir";
            Fault::new(FaultKind::Precondition, "checkpoint_dir", "not set", "a folder", remedy)
        })
    }

    fn describe_open(&self, handle: &Arc<JobHandle>, brief: bool) -> v1::DescribeResponse {
        let job = &handle.job;
        let (pushed_bytes, pulled_bytes) = job.traffic();
        let rank = |rank: RankProgress| {
            let transport = self.transport_of(handle, rank.rank);
            let watches = rank.incarnation.is_some_and(|process| handle.watchers.has(rank.rank, process));
            convert::rank(rank, transport, watches)
        };
        let span = handle.pace.span();
        let (written_of_checkpoints, bytes_of_checkpoints) = job.checkpoint_progress().unwrap_or_default();
        v1::DescribeResponse {
            owner: handle.owner.clone().unwrap_or_default(),
            idle_ms: handle.look().as_millis() as u64,
            spec: (!brief).then(|| job.spec().to_wire()),
            placement: (!brief).then(|| job.placement().to_wire()),
            server: job.server().0,
            progress: Some(convert::progress(job.progress())),
            ranks: job.ranks().into_iter().map(rank).collect(),
            memory_bytes: job.memory_bytes(),
            hashes: Vec::new(),
            hash_version: 0,
            hash_applied: 0,
            pushed_bytes,
            pulled_bytes,
            waiting_for: job.waiting_for().unwrap_or_default(),
            isa: job.compute().isa().to_string(),
            threads: job.compute().threads() as u32,
            disk_bytes: job.disk_bytes(),
            disk_written_bytes: job.written_bytes(),
            paced_steps: span.steps,
            paced_seconds: span.time.as_secs_f64(),
            paced_written_bytes: span.written,
            drive_endurance_bytes: 0,
            lists_left_out: false,
            tensors: job.spec().params.len() as u32,
            parameters: job.spec().params.iter().filter_map(Param::elements).sum(),
            spill: job.spill().map_or("", Spill::name).into(),
            checkpoints: None,
            steps: Vec::new(),
            failure: job.check_alive().err().map(|fault| fault.to_string()).unwrap_or_default(),
            update_seconds: handle.busy.updates().as_secs_f64(),
            elements: handle.elements(),
            update_bytes: job.update_bytes(),
            checkpoint_bytes: bytes_of_checkpoints,
            checkpoint_written_bytes: written_of_checkpoints,
        }
    }
}
