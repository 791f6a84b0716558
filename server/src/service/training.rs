//! Training: open, join, commit, pause, leave. Statistics and watch have modules of their own.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use longshore_engine::{
    record::{Joined, Record, Standing},
    step::{Phase, Progress},
    tier::StoredJob,
};
use longshore_proto::{
    Commit, Fault, FaultKind, Incarnation, JobName, JobSpec, Origin, Placement, PlacementChange, Rank,
    ServerId, Version, limits::PROTOCOL,
};
use longshore_wire::{
    self as wire, Wire,
    direct::Connection,
    v1::{self, training_server::Training},
};
use tokio::time::Instant;
use tonic::{Request, Response, Status};

use super::{
    Services, blocking, convert, default_deadline,
    permitted::Call,
    room::{Answers, Kept, Room},
    stand, stats, watch,
};
use crate::{
    jobs::{Decided, JobHandle, check_reached},
    tasks::finished,
};

/// Longest wait for the checkpoint folder while a job is opened. A restarting file server is silent for some seconds,
/// and workers wait 60 s for a job to open.
const FOLDER_PATIENCE: Duration = Duration::from_secs(10);
/// Longest wait of a Join for rank 0 to announce another world size.
const RANK_0_PATIENCE: Duration = Duration::from_secs(2);

#[tonic::async_trait]
impl Training for Services {
    async fn open_job(
        &self,
        request: Request<v1::OpenJobRequest>,
    ) -> Result<Response<v1::OpenJobResponse>, Status> {
        let (call, request) = Call::permitted(request)?;
        let answer = self.open(request, call.caller.owner(), &call.room).await;
        answer.map(Kept::answer).map_err(|fault| call.refuse(fault))
    }

    async fn join(&self, request: Request<v1::JoinRequest>) -> Result<Response<v1::JoinResponse>, Status> {
        let connection = Connection::of(request.extensions()).cloned();
        let (call, request) = Call::permitted(request)?;
        let answer = self.join_job(&request, connection.as_ref(), &call.room).await;
        answer.map(Kept::answer).map_err(|fault| call.refuse(fault))
    }

    type StatsStream = Answers<v1::ShardStats>;

    async fn stats(&self, request: Request<v1::StatsRequest>) -> Result<Response<Self::StatsStream>, Status> {
        let (call, request) = Call::permitted(request)?;
        let stream = stats::stream(self, &request, call.room.clone());
        stream.map(Response::new).map_err(|fault| call.refuse(fault))
    }

    async fn commit(
        &self,
        request: Request<v1::CommitRequest>,
    ) -> Result<Response<v1::CommitResponse>, Status> {
        let (call, request) = Call::permitted(request)?;
        let answer = self.commit_step(request).await;
        answer.map(Response::new).map_err(|fault| call.refuse(fault))
    }

    async fn await_durable(
        &self,
        request: Request<v1::AwaitDurableRequest>,
    ) -> Result<Response<v1::AwaitDurableResponse>, Status> {
        let (call, request) = Call::permitted(request)?;
        self.await_durability(&request).await.map_err(|fault| call.refuse(fault))?;
        Ok(Response::new(v1::AwaitDurableResponse {}))
    }

    type WatchStream = Answers<v1::Event>;

    async fn watch(&self, request: Request<v1::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let (call, request) = Call::permitted(request)?;
        let is_rank = call.caller.may_train(&request.job);
        let stream = watch::stream(self, &request, is_rank, call.room.clone());
        stream.map(Response::new).map_err(|fault| call.refuse(fault))
    }

    async fn pause(&self, request: Request<v1::PauseRequest>) -> Result<Response<v1::PauseResponse>, Status> {
        let (call, request) = Call::permitted(request)?;
        let answer = self.pause_job(&request).await;
        answer.map(Response::new).map_err(|fault| call.refuse(fault))
    }

    async fn begin(&self, request: Request<v1::BeginRequest>) -> Result<Response<v1::BeginResponse>, Status> {
        let (call, request) = Call::permitted(request)?;
        let begun = match request.takes_part {
            true => self.place_job(request).await,
            false => self.begin_job(request).await,
        };
        begun.map_err(|fault| call.refuse(fault))?;
        Ok(Response::new(v1::BeginResponse {}))
    }

    async fn retire(
        &self,
        request: Request<v1::RetireRequest>,
    ) -> Result<Response<v1::RetireResponse>, Status> {
        let (call, request) = Call::permitted(request)?;
        self.retire_job(&request).await.map_err(|fault| call.refuse(fault))?;
        Ok(Response::new(v1::RetireResponse {}))
    }

    async fn leave(&self, request: Request<v1::LeaveRequest>) -> Result<Response<v1::LeaveResponse>, Status> {
        let (call, request) = Call::permitted(request)?;
        let leave = || -> Result<(), Fault> {
            let handle = self.jobs.get(&request.job)?;
            handle.job.protocol.leave(Rank(request.rank), wire::incarnation_from_wire(request.incarnation)?)
        };
        leave().map_err(|fault| call.refuse(fault))?;
        tracing::info!(job = request.job, rank = request.rank, "rank left");
        Ok(Response::new(v1::LeaveResponse {}))
    }
}

impl Services {
    async fn open(
        &self,
        request: v1::OpenJobRequest,
        owner: Option<String>,
        room: &Room,
    ) -> Result<Kept<v1::OpenJobResponse>, Fault> {
        self.draining.refuse()?;
        if request.protocol > PROTOCOL {
            let limit = format!("at most {PROTOCOL}, this server's");
            let remedy = "start the workers' version of longshored here, before the workers";
            return Err(Fault::new(FaultKind::Precondition, "protocol", request.protocol, limit, remedy));
        }
        let spec = JobSpec::from_wire(request.spec)?;
        let placement = Placement::from_wire(request.placement)?;
        if self.is_witness && !placement.held(ServerId(request.server)).is_empty() {
            let limit = "no server that keeps shards of a job";
            let remedy = "open the job on other servers, and then add this one: `longshore scale --add`";
            return Err(Fault::new(FaultKind::Precondition, "placement.servers", "a witness", limit, remedy));
        }
        if request.is_there
            && let Err(fault) = self.jobs.get(spec.name.as_str())
            && (fault.kind, &*fault.field) == (FaultKind::NotFound, "job")
        {
            return Err(fault);
        }
        self.check_not_evicted(&spec.name).await?;
        let server = ServerId(request.server);
        // A witness fetches no shard, so it need not reach other servers.
        if request.is_new && !self.is_witness {
            let (job, placement, tls_dir) = (spec.name.clone(), placement.clone(), self.tls_dir.clone());
            let check = async move { check_reached(&job, &placement, server, tls_dir.as_deref()).await };
            // The check is a task of its own: other servers' answers do not count as messages of this call.
            finished(tokio::spawn(check)).await?;
        }
        let jobs = self.jobs.clone();
        let wanted = StoredJob { spec, placement, server, owner };
        let is_new = request.is_new;
        let (created, handle) = jobs.open(wanted, is_new, Incarnation(request.incarnation)).await?;
        let job = &handle.job;
        if created && is_new {
            self.jobs.end_unused(&handle);
        }
        if created {
            tracing::info!(
                job = %job.spec().name,
                elements = job.layout().elements(),
                shards = job.opened().len(),
                of_shards = job.layout().shards(),
                bytes = job.memory_bytes(),
                owner = handle.owner.as_deref().unwrap_or_default(),
                rule = %job.spec().rule,
                "job opened"
            );
        }
        let answer = || {
            let (progress, world_size) = (Some(convert::progress(job.progress())), job.spec().world_size);
            Ok(v1::OpenJobResponse { created, progress, world_size })
        };
        room.make(default_deadline(), answer).await
    }

    /// Refuses a job without state here if an earlier release evicted its state to a checkpoint.
    async fn check_not_evicted(&self, name: &JobName) -> Result<(), Fault> {
        let has_state = |handle: Arc<JobHandle>| handle.job.progress().phase != Phase::Loading;
        let Some(store) =
            self.checkpoints.clone().filter(|_| !self.jobs.get(name.as_str()).is_ok_and(has_state))
        else {
            return Ok(());
        };
        let name = name.clone();
        let read = blocking(move || store.check_not_evicted(&name));
        tokio::time::timeout(FOLDER_PATIENCE, read).await.unwrap_or_else(|_| {
            let value = format!("without an answer for {} s", FOLDER_PATIENCE.as_secs());
            let remedy = "see whether the folder of --checkpoint-dir is mounted and its file server answers; the call is repeated";
            Err(Fault::new(FaultKind::Unavailable, "checkpoint_dir", value, "a folder that answers", remedy))
        })
    }

    async fn join_job(
        &self,
        request: &v1::JoinRequest,
        connection: Option<&Connection>,
        room: &Room,
    ) -> Result<Kept<v1::JoinResponse>, Fault> {
        let handle = self.jobs.get(&request.job)?;
        let (rank, incarnation) = (Rank(request.rank), wire::incarnation_from_wire(request.incarnation)?);
        // Chunks of an earlier process that are still arriving end here. A slow link could take minutes to deliver
        // them.
        handle.job.protocol.fence(rank, incarnation)?;
        self.fences.send_modify(|count| *count += 1);
        if let Some(connection) = connection {
            handle.processes.called(rank, incarnation, self.transport, &connection.account);
        }
        if request.fence_only {
            let job = Arc::clone(&handle.job);
            blocking(move || job.protocol.keep_joined()).await?;
            let progress = handle.job.progress();
            tracing::info!(job = request.job, %rank, %incarnation, version = progress.version.0, "rank fenced");
            return joined(connection, &handle, room, (rank, progress), None).await;
        }
        // Join is busy only while contributions of the previous process are summed, or go to a drive.
        let world_size = Some(request.world_size).filter(|&world_size| world_size != 0);
        let join = || {
            // A step may be decided before this call is answered, above all during a wait for a drive. The answer must
            // still name the version at the join. The joining process has no gradient of that step. A server that lost
            // the step would wait for the gradient in vain.
            let progress = handle.job.progress();
            let joined = handle.job.join(rank, incarnation, world_size)?;
            Ok(joined.then(|| Progress { world_size: handle.job.progress().world_size, ..progress }))
        };
        // The rank repeats the call until its own deadline, and then reports why it waited.
        let waits_for = |of: u32| rank != Rank(0) && world_size.is_some_and(|world_size| world_size != of);
        let late = || match handle.job.progress().world_size {
            of if waits_for(of) => {
                let value = format!("{} on {rank}", request.world_size);
                let remedy =
                    "start all ranks anew with the same number of them, rank 0 too, as torchrun does";
                Fault::new(FaultKind::Unavailable, "world_size", value, format!("{of}, rank 0's"), remedy)
            }
            _ => handle.late("join", rank),
        };
        let is_early = waits_for(handle.job.progress().world_size);
        let deadline = if is_early { Instant::now() + RANK_0_PATIENCE } else { default_deadline() };
        let progress = handle.until(deadline, join, late).await?;
        self.fences.send_modify(|count| *count += 1);
        let job = Arc::clone(&handle.job);
        blocking(move || job.protocol.keep_joined()).await?;
        handle.stages.joined();
        if rank == Rank(0) {
            request.moved.iter().for_each(|of| handle.readdress(ServerId(of.server), &of.address));
        }
        // After a restart of this server its ranks join again, and the first join resumes the fetches.
        handle.fetch_awaited(self.tls_dir.as_deref());
        let (version, transport) = (progress.version.0, self.transport);
        tracing::info!(job = request.job, %rank, %incarnation, version, transport, "rank joined");
        joined(connection, &handle, room, (rank, progress), self.links.offer()).await
    }

    async fn commit_step(&self, request: v1::CommitRequest) -> Result<v1::CommitResponse, Fault> {
        let commit = Commit::from_wire(request.commit)?;
        let incarnation = wire::incarnation_from_wire(request.incarnation)?;
        let handle = self.jobs.get(&request.job)?;
        let (step, skip, pause) = (commit.step, commit.skip, commit.pause_reason.clone());
        let change = commit.placement.clone();
        // Without this wait the commit would be refused: its update would overwrite the newest durable version.
        let before = Version(step.0.saturating_sub(1)).min(handle.job.progress().version);
        handle.until_durable(before, default_deadline()).await?;
        let written = handle.job.written_bytes();
        if let Some(report) = &request.report {
            handle.fetching.note_report(&report.scaling, report.scaled_micros);
        }
        let decided = Decided::now(&commit, request.report);
        let (duplicate, works) = handle.job.commit_from(incarnation, commit, Origin(request.origin))?;
        if !duplicate {
            // The decision is recorded before any of its updates can be done.
            handle.stages.decided(step, std::time::Instant::now());
        }
        handle.perform(works);
        handle.decided(step.version());
        if handle.job.may_free() {
            let job = Arc::clone(&handle.job);
            tokio::task::spawn_blocking(move || job.free_handed());
        }
        if let Some(PlacementChange { removed, lost, .. }) = change {
            if !lost.is_empty() {
                handle.forget_losses();
            }
            handle.fetch_awaited(self.tls_dir.as_deref());
            if removed.contains(&handle.job.server()) {
                self.jobs.end_unused(&handle);
            }
        }
        if !duplicate {
            handle.pace.decided(step.0, written);
            handle.note(decided);
            if !pause.is_empty() {
                tracing::warn!(job = request.job, %step, reason = pause, "job paused");
            }
        }
        // Weights that are ready leave before the answer, so rank 0 wakes once for both.
        tokio::task::yield_now().await;
        tracing::debug!(job = request.job, %step, skip, duplicate, "committed");
        Ok(v1::CommitResponse { duplicate })
    }

    async fn begin_job(&self, request: v1::BeginRequest) -> Result<(), Fault> {
        let incarnation = wire::incarnation_from_wire(request.incarnation)?;
        let placement = Placement::from_wire(request.placement)?;
        let handle = self.jobs.get(&request.job)?;
        let progress = request.progress.ok_or_else(|| wire::missing("progress"))?;
        let commit = progress.last_commit.map(|commit| Commit::from_wire(Some(commit))).transpose()?;
        if let Some(commit) = &commit {
            commit.validate(handle.job.spec())?;
        }
        let most = handle.job.spec().world_size;
        let world_size = if progress.world_size < most { progress.world_size } else { 0 };
        let left_out = wire::left_outs_from_wire(progress.left_out);
        // A pause that came with the commit is part of the commit. A later pause is kept by itself.
        let is_paused_since =
            !progress.pause_reason.is_empty() && commit.as_ref().is_none_or(|of| of.pause_reason.is_empty());
        let paused = Standing { paused: Some(progress.pause_reason), loss_scale: None };
        let standing = is_paused_since.then_some(paused);
        let version = Version(progress.version);
        let record = Record { left_out, standing, ..Record::new(version, progress.applied, commit) };
        let mut ranks = vec![None; most as usize];
        for member in request.ranks {
            let joined = Joined {
                incarnation: wire::incarnation_from_wire(member.incarnation)?,
                at: Version(member.joined_at),
                // Ranks other than 0 join this server later. The answer that names such a rank may name a process that
                // has only fenced.
                fence_only: member.rank != 0,
                world_size,
            };
            let limit = format!("below the world size, {}", ranks.len());
            let remedy = "name the ranks of Admin.Describe";
            let unknown = || Fault::invalid("ranks.rank", member.rank, limit, remedy);
            *ranks.get_mut(member.rank as usize).ok_or_else(unknown)? = Some(joined);
        }
        let job = Arc::clone(&handle.job);
        blocking(move || job.begin(incarnation, placement, record, &ranks)).await?;
        handle.decided(version);
        tracing::info!(job = request.job, version = version.0, "takes part from here on");
        Ok(())
    }

    async fn place_job(&self, request: v1::BeginRequest) -> Result<(), Fault> {
        let incarnation = wire::incarnation_from_wire(request.incarnation)?;
        let placement = Placement::from_wire(request.placement)?;
        let handle = self.jobs.get(&request.job)?;
        let version = Version(request.progress.ok_or_else(|| wire::missing("progress"))?.version);
        let (epoch, members) = (placement.epoch, placement.members().collect::<Vec<_>>());
        let (wanted, is_settled) = (handle.wanted(), placement.handovers.is_empty());
        let servers: BTreeSet<&str> = placement.addresses().collect();
        let is_wanted = servers == wanted.servers.iter().map(String::as_str).collect();
        stand(&handle, move |job| job.place(incarnation, version, placement.clone())).await?;
        // Without a rank 0 no commit reports that the wish is fulfilled.
        if is_settled && is_wanted {
            handle.fetching.note_report("", wanted.asked_micros);
        }
        handle.fetch_awaited(self.tls_dir.as_deref());
        if !members.contains(&handle.job.server()) {
            self.jobs.end_unused(&handle);
        }
        tracing::info!(job = request.job, %version, epoch = epoch.0, "the servers change between two steps");
        Ok(())
    }

    async fn retire_job(&self, request: &v1::RetireRequest) -> Result<(), Fault> {
        let incarnation = wire::incarnation_from_wire(request.incarnation)?;
        let handle = self.jobs.get(&request.job)?;
        if handle.job.is_spare() && handle.job.progress().phase == Phase::Loading {
            // The wish that this job was opened for is withdrawn. The fence fails if a newer process has opened the job
            // for another wish.
            handle.job.protocol.fence(Rank(0), incarnation)?;
            drop(handle);
            return Arc::clone(&self.jobs).delete(&request.job, false).await;
        }
        let (server, ours) = (handle.job.server(), handle.job.placement());
        let newest = request.placement.clone().map(|of| Placement::from_wire(Some(of))).transpose()?;
        // A server that a decision has given up knows an earlier placement, and maybe an earlier process of rank 0.
        let gives_up = |newest: &Placement| {
            let is_out = newest.servers.get(server.0 as usize).is_some_and(String::is_empty);
            handle.job.spec().replicas > 1 && newest.epoch > ours.epoch && is_out
        };
        let newest = newest.filter(gives_up);
        let is_lost = newest.is_some();
        let placement = newest.unwrap_or(ours);
        if placement.members().any(|member| member == server) {
            let remedy = "move its shards first: `longshore scale`";
            let limit = "one that has left the job";
            return Err(Fault::new(FaultKind::Precondition, "server", server, limit, remedy));
        }
        let has_led = handle.job.protocol.ranks().first().is_some_and(|rank| rank.incarnation.is_some());
        match is_lost && has_led {
            true => handle.job.protocol.fence(Rank(0), incarnation)?,
            false => handle.job.protocol.check_rank(Rank(0), incarnation)?,
        }
        Arc::clone(&self.jobs).retire(handle, &placement).await
    }

    async fn await_durability(&self, request: &v1::AwaitDurableRequest) -> Result<(), Fault> {
        let handle = self.jobs.get(&request.job)?;
        let deadline = Instant::now() + wire::deadline(request.deadline_ms)?;
        handle.until_durable(Version(request.version), deadline).await
    }

    async fn pause_job(&self, request: &v1::PauseRequest) -> Result<v1::PauseResponse, Fault> {
        let incarnation = wire::incarnation_from_wire(request.incarnation)?;
        let handle = self.jobs.get(&request.job)?;
        let reason = request.reason.clone();
        stand(&handle, move |job| job.protocol.pause(incarnation, &reason)).await?;
        tracing::warn!(job = request.job, reason = request.reason, "job paused");
        Ok(v1::PauseResponse {})
    }
}

/// Answers a join. From here on the connection is a rank's.
async fn joined(
    connection: Option<&Connection>,
    handle: &JobHandle,
    room: &Room,
    (rank, progress): (Rank, Progress),
    memfd: Option<v1::MemfdOffer>,
) -> Result<Kept<v1::JoinResponse>, Fault> {
    connection.iter().for_each(|connection| handle.seats.take(connection));
    let joined_at = handle.job.protocol.joined_at(rank).map(|version| version.0);
    let answer = || {
        let progress = Some(convert::progress(progress.clone()));
        Ok(v1::JoinResponse {
            progress,
            memfd: memfd.clone(),
            joined_at,
            tier: handle.job.spec().tier.number(),
        })
    };
    room.make(default_deadline(), answer).await
}
