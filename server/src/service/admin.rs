//! Admin: list, describe, checkpoints, resume, delete, drain.

use std::{sync::Arc, time::UNIX_EPOCH};

use longshore_engine::{checkpoint::Store, step::Wanted};
use longshore_proto::{
    Fault, FaultKind, Incarnation, JobSpec, ServerId, Version, check_max_exposed, limits::MAX_SERVERS,
};
use longshore_wire::{
    self as wire, Author, Wire,
    v1::{self, admin_server::Admin},
};
use tonic::{Request, Response, Status};

use super::{
    Services, convert, default_deadline, describe, export,
    permitted::Call,
    refuse,
    room::{Answers, Kept, Room},
    stand,
};
use crate::{jobs::StepBack, trust::Caller};

#[tonic::async_trait]
impl Admin for Services {
    async fn list_jobs(
        &self,
        request: Request<v1::ListJobsRequest>,
    ) -> Result<Response<v1::ListJobsResponse>, Status> {
        let answer = async {
            let (caller, room) = (Caller::of(request.extensions())?, Room::of(request.extensions()));
            let shard_room = self.room_for(&caller, request.into_inner().spec).await?;
            let answer = || Ok(v1::ListJobsResponse { shard_room, ..self.list_for(&caller) });
            room.make(default_deadline(), answer).await
        };
        answer.await.map(Kept::answer).map_err(|fault| refuse("ListJobs", "", fault))
    }

    async fn describe(
        &self,
        request: Request<v1::DescribeRequest>,
    ) -> Result<Response<v1::DescribeResponse>, Status> {
        let (call, request) = Call::permitted(request)?;
        let answer = describe::whole(self, &request, &call.room).await;
        answer.map(Kept::answer).map_err(|fault| call.refuse(fault))
    }

    type DescribeInPartsStream = Answers<v1::DescribeResponse>;

    async fn describe_in_parts(
        &self,
        request: Request<v1::DescribeRequest>,
    ) -> Result<Response<Self::DescribeInPartsStream>, Status> {
        let (call, request) = Call::permitted(request)?;
        let parts = describe::in_parts(self, &request, call.room.clone()).await;
        parts.map(Response::new).map_err(|fault| call.refuse(fault))
    }

    async fn checkpoint(
        &self,
        request: Request<v1::CheckpointRequest>,
    ) -> Result<Response<v1::CheckpointResponse>, Status> {
        let author = Author::of(request.metadata());
        let (call, request) = Call::permitted(request)?;
        let answer = self.write_checkpoint(&request, author, &call.room).await;
        answer.map(Kept::answer).map_err(|fault| call.refuse(fault))
    }

    async fn seal_checkpoint(
        &self,
        request: Request<v1::SealCheckpointRequest>,
    ) -> Result<Response<v1::SealCheckpointResponse>, Status> {
        let author = Author::of(request.metadata());
        let (call, request) = Call::permitted(request)?;
        let answer = self.seal(request, author).await;
        answer.map(Response::new).map_err(|fault| call.refuse(fault))
    }

    async fn discard_checkpoint(
        &self,
        request: Request<v1::DiscardCheckpointRequest>,
    ) -> Result<Response<v1::DiscardCheckpointResponse>, Status> {
        let author = Author::of(request.metadata());
        let (call, request) = Call::permitted(request)?;
        let answer = self.discard(request, author).await;
        answer.map(Response::new).map_err(|fault| call.refuse(fault))
    }

    async fn list_checkpoints(
        &self,
        request: Request<v1::ListCheckpointsRequest>,
    ) -> Result<Response<v1::ListCheckpointsResponse>, Status> {
        let (call, request) = Call::permitted(request)?;
        let answer = self.list(&request.job, &call.room).await;
        answer.map(Kept::answer).map_err(|fault| call.refuse(fault))
    }

    async fn restore(
        &self,
        request: Request<v1::RestoreRequest>,
    ) -> Result<Response<v1::RestoreResponse>, Status> {
        let (call, request) = Call::permitted(request)?;
        let answer = self.restore_job(&request, &call.room).await;
        answer.map(Kept::answer).map_err(|fault| call.refuse(fault))
    }

    type ExportStream = export::Messages;

    async fn export(
        &self,
        request: Request<v1::ExportRequest>,
    ) -> Result<Response<Self::ExportStream>, Status> {
        let (call, request) = Call::permitted(request)?;
        if request.state {
            call.caller.permit_state().map_err(|fault| call.refuse(fault))?;
        }
        let messages = export::start(self, request, &call.room);
        messages.map(Response::new).map_err(|fault| call.refuse(fault))
    }

    async fn resume(
        &self,
        request: Request<v1::ResumeRequest>,
    ) -> Result<Response<v1::ResumeResponse>, Status> {
        let (call, request) = Call::permitted(request)?;
        self.resume_job(&request).await.map_err(|fault| call.refuse(fault))?;
        tracing::info!(job = request.job, loss_scale = request.loss_scale, "job resumed");
        Ok(Response::new(v1::ResumeResponse {}))
    }

    async fn scale(&self, request: Request<v1::ScaleRequest>) -> Result<Response<v1::ScaleResponse>, Status> {
        let (call, request) = Call::permitted(request)?;
        if !request.servers.is_empty() {
            call.caller.permit_wish().map_err(|fault| call.refuse(fault))?;
        }
        self.scale_job(request).map_err(|fault| call.refuse(fault))?;
        Ok(Response::new(v1::ScaleResponse {}))
    }

    async fn step_back(
        &self,
        request: Request<v1::StepBackRequest>,
    ) -> Result<Response<v1::StepBackResponse>, Status> {
        let (call, request) = Call::permitted(request)?;
        let answer = self.step_job_back(&request, &call.room).await;
        answer.map(Kept::answer).map_err(|fault| call.refuse(fault))
    }

    async fn delete_job(
        &self,
        request: Request<v1::DeleteJobRequest>,
    ) -> Result<Response<v1::DeleteJobResponse>, Status> {
        let (call, v1::DeleteJobRequest { job, discard_unreadable }) = Call::permitted(request)?;
        let deleted = Arc::clone(&self.jobs).delete(&job, discard_unreadable).await;
        deleted.map_err(|fault| call.refuse(fault))?;
        tracing::info!(job, "job deleted");
        Ok(Response::new(v1::DeleteJobResponse {}))
    }

    async fn drain(
        &self,
        _request: Request<v1::DrainRequest>,
    ) -> Result<Response<v1::DrainResponse>, Status> {
        self.draining.drain().await.map_err(|fault| refuse("Drain", "", fault))?;
        Ok(Response::new(v1::DrainResponse {}))
    }
}

impl Services {
    fn list_for(&self, caller: &Caller) -> v1::ListJobsResponse {
        let jobs = self.jobs.names().into_iter().filter(|job| caller.sees(job)).collect();
        let budget = self.jobs.budget();
        let (memory_budget, memory_reserved) = (budget.total(), budget.reserved());
        let owners = self.jobs.owners().into_iter().filter(|(owner, _)| caller.sees_owner(&owner.name));
        let identities = owners.map(|(owner, usage)| convert::identity(owner, usage)).collect();
        v1::ListJobsResponse {
            identities,
            jobs,
            memory_budget,
            memory_reserved,
            release: env!("CARGO_PKG_VERSION").into(),
            unix_micros: UNIX_EPOCH.elapsed().map_or(0, |since| since.as_micros() as u64),
            shard_room: None,
            is_witness: self.is_witness,
        }
    }

    /// Returns the number of further shards of a job that fit here. None if the request names no job.
    async fn room_for(&self, caller: &Caller, spec: Option<v1::JobSpec>) -> Result<Option<u32>, Fault> {
        let Some(spec) = spec else { return Ok(None) };
        let spec = JobSpec::from_wire(Some(spec))?;
        caller.permit(&spec.name)?;
        let shards = self.jobs.clone().room(spec).await?;
        Ok(Some(u32::try_from(shards).unwrap_or(u32::MAX)))
    }

    fn scale_job(&self, request: v1::ScaleRequest) -> Result<(), Fault> {
        let handle = self.jobs.get(&request.job)?;
        let servers = request.servers;
        let is_named =
            |(index, address): (usize, &String)| !address.is_empty() && !servers[..index].contains(address);
        let most = MAX_SERVERS.min(handle.job.layout().shards() as usize);
        // A request may only report lost servers. Such a request is no wish, and has no list of servers.
        let is_word = servers.is_empty() && !request.lost.is_empty();
        if servers.is_empty() && !is_word || servers.len() > most || !servers.iter().enumerate().all(is_named)
        {
            let limit = format!("1 to {most} addresses, each once: a server owns a shard at least");
            return Err(Fault::invalid(
                "servers",
                format!("{servers:?}"),
                limit,
                "name the servers to train on",
            ));
        }
        // A lost server may have left the job since the caller looked. Its number is then ignored.
        let placement = handle.job.placement();
        let addresses = |lost: &[ServerId]| {
            let named = lost.iter().filter_map(|server| placement.servers.get(server.0 as usize)).cloned();
            named.collect::<Vec<_>>()
        };
        let lost: Vec<ServerId> = request.lost.iter().copied().map(ServerId).collect();
        let is_wanted = |lost: &&String| servers.contains(lost) || request.lost.len() > MAX_SERVERS;
        if let Some(lost) = addresses(&lost).iter().find(is_wanted) {
            let limit = format!("at most {MAX_SERVERS} servers, none of which is named to train on");
            return Err(Fault::invalid("lost", lost, limit, "name the servers that Admin.Describe shows"));
        }
        if request.max_exposed != 0.0 {
            check_max_exposed(request.max_exposed)?;
        }
        let tier = Some(request.tier).filter(|&tier| tier != 0);
        let tier = tier.map(|tier| wire::tier_from_wire("tier", tier)).transpose()?;
        if let Some(tier) = tier {
            JobSpec { tier, ..handle.job.spec().clone() }.validate()?;
        }
        let max_exposed = request.max_exposed;
        let asked_micros = if is_word { 0 } else { request.asked_micros };
        let wanted = Wanted { servers, asked_micros, max_exposed, tier, lost, words: 0 };
        let mut then = handle.wanted();
        then.take(wanted.clone(), &placement);
        if let Some(shard) = handle.job.last_of(&then.lost) {
            let value = format!("{}, with the last of {shard}", addresses(&then.lost).join(","));
            let remedy =
                "start that server again if its tier keeps state, or `longshore restore` the last checkpoint";
            return Err(Fault::new(
                FaultKind::Precondition,
                "lost",
                value,
                "servers whose shards others hold too",
                remedy,
            ));
        }
        if request.check {
            return Ok(());
        }
        tracing::info!(job = request.job, servers = ?wanted.servers, lost = ?addresses(&wanted.lost), "other servers are wanted");
        handle.want(wanted);
        Ok(())
    }

    async fn resume_job(&self, request: &v1::ResumeRequest) -> Result<(), Fault> {
        let handle = self.jobs.get(&request.job)?;
        let (version, loss_scale) = (request.version.map(Version), request.loss_scale);
        stand(&handle, move |job| job.protocol.resume(version, loss_scale)).await
    }

    async fn step_job_back(
        &self,
        request: &v1::StepBackRequest,
        room: &Room,
    ) -> Result<Kept<v1::StepBackResponse>, Fault> {
        self.draining.refuse()?;
        let to = StepBack {
            incarnation: wire::incarnation_from_wire(request.incarnation)?,
            version: Version(request.version),
            decided_by: Incarnation(request.decided_by),
        };
        let handle = Arc::clone(&self.jobs).step_back(&request.job, to).await?;
        let answer = || Ok(v1::StepBackResponse { progress: Some(convert::progress(handle.job.progress())) });
        room.make(default_deadline(), answer).await
    }

    pub(crate) fn store(&self) -> Result<Arc<Store>, Fault> {
        self.checkpoints.clone().ok_or_else(|| {
            let remedy = "start the server with --checkpoint-dir";
            Fault::new(FaultKind::Precondition, "checkpoint_dir", "not set", "a folder", remedy)
        })
    }
}
