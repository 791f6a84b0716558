//! A stock gRPC client: generated stubs without the worker library. Tests use it to send requests that the
//! library never sends.

use std::net::SocketAddr;

use bytes::Bytes;
use longshore_proto::{
    Commit, Correction, Dtype, Fault, FaultKind, Hyper, Incarnation, JobSpec, Layout, Placement, ShardId,
    Step, checksum::crc32,
};
use longshore_wire::{
    Wire, dtype_to_wire, fault_from_status, fault_from_wire,
    v1::{self, admin_client::AdminClient, tensors_client::TensorsClient, training_client::TrainingClient},
};
use tokio::runtime::Handle;
use tonic::{Response, Status, transport::Channel};

pub struct Raw {
    runtime: Handle,
    pub training: TrainingClient<Channel>,
    pub tensors: TensorsClient<Channel>,
    pub admin: AdminClient<Channel>,
}

/// The step, rank and incarnation that a chunk names.
#[derive(Clone, Copy, Debug)]
pub struct At {
    pub step: u64,
    pub rank: u32,
    pub incarnation: Incarnation,
}

impl Raw {
    pub fn connect(runtime: Handle, address: SocketAddr) -> Raw {
        let endpoint = Channel::from_shared(format!("http://{address}")).expect("an address");
        let channel = runtime.block_on(endpoint.connect()).expect("a server that listens");
        Raw {
            runtime,
            training: TrainingClient::new(channel.clone()),
            tensors: TensorsClient::new(channel.clone()),
            admin: AdminClient::new(channel),
        }
    }

    /// Waits for one answer. An error's details become the returned fault.
    pub fn call<T>(&self, call: impl Future<Output = Result<Response<T>, Status>>) -> Result<T, Fault> {
        let answer = self.runtime.block_on(call);
        answer.map(Response::into_inner).map_err(|status| fault_from_status(&status, "the server"))
    }

    pub fn open(
        &self,
        spec: v1::JobSpec,
        placement: &Placement,
        server: u32,
    ) -> Result<v1::OpenJobResponse, Fault> {
        let request = v1::OpenJobRequest {
            spec: Some(spec),
            placement: Some(placement.to_wire()),
            server,
            ..Default::default()
        };
        self.call(self.training.clone().open_job(request))
    }

    pub fn join(&self, job: &str, rank: u32, incarnation: u64) -> Result<v1::JobProgress, Fault> {
        let request = v1::JoinRequest { job: job.into(), rank, incarnation, ..Default::default() };
        let answer = self.call(self.training.clone().join(request))?;
        Ok(answer.progress.expect("a join answers with the progress"))
    }

    pub fn find(&self, job: &str) -> Result<v1::DescribeResponse, Fault> {
        let request = v1::DescribeRequest { job: job.into(), ..Default::default() };
        self.call(self.admin.clone().describe(request))
    }

    pub fn describe(&self, job: &str) -> v1::DescribeResponse {
        self.find(job).expect("the job is there")
    }

    pub fn progress(&self, job: &str) -> v1::JobProgress {
        self.describe(job).progress.expect("a job has a progress")
    }

    /// Ends the pause at `version`. Succeeds too if the pause has already ended, because rank 0 also passes a resume on
    /// to all servers.
    pub fn resume(&self, job: &str, version: u64, loss_scale: f64) -> Result<(), Fault> {
        let request = v1::ResumeRequest { job: job.into(), loss_scale, version: Some(version) };
        self.call(self.admin.clone().resume(request)).map(|_| ())
    }

    pub fn commit(&self, job: &str, incarnation: Incarnation, commit: &Commit) -> Result<bool, Fault> {
        let commit = Some(commit.to_wire());
        let request = v1::CommitRequest {
            job: job.into(),
            incarnation: incarnation.0,
            commit,
            origin: 0,
            report: None,
        };
        Ok(self.call(self.training.clone().commit(request))?.duplicate)
    }

    /// Waits until all gradient statistics of a step are there. Only then may the step be decided.
    pub fn await_stats(&self, job: &str, step: u64) {
        let request = v1::StatsRequest { job: job.into(), step, deadline_ms: 30_000 };
        self.runtime.block_on(async {
            let mut answers = self.training.clone().stats(request).await.expect("statistics").into_inner();
            while answers.message().await.expect("statistics in time").is_some() {}
        });
    }

    pub fn restore(&self, job: &str, name: &str) -> Result<v1::RestoreResponse, Fault> {
        self.restore_in(job, name, v1::RestoreMode::Whole)
    }

    /// Restores a checkpoint on this server, in the given mode.
    pub fn restore_in(
        &self,
        job: &str,
        name: &str,
        mode: v1::RestoreMode,
    ) -> Result<v1::RestoreResponse, Fault> {
        let request =
            v1::RestoreRequest { job: job.into(), name: name.into(), mode: mode.into(), deadline_ms: 0 };
        self.call(self.admin.clone().restore(request))
    }

    /// Pushes one chunk on its own stream. Returns true if the server already held it.
    pub fn push(&self, request: v1::PushRequest) -> Result<bool, Fault> {
        let result = self.push_all(vec![request])?.pop().expect("a result in the answer");
        result.refusal.map_or(Ok(result.duplicate), |refusal| Err(fault_from_wire(refusal)))
    }

    /// Pushes chunks on one stream. Returns one result for each chunk.
    pub fn push_all(&self, requests: Vec<v1::PushRequest>) -> Result<Vec<v1::PushResult>, Fault> {
        self.runtime.block_on(async {
            let fault = |status: Status| fault_from_status(&status, "the server");
            let mut client = self.tensors.clone();
            let mut answers = client.push(tokio_stream::iter(requests)).await.map_err(fault)?.into_inner();
            let mut results = Vec::new();
            while let Some(answer) = answers.message().await.map_err(fault)? {
                results.extend(answer.results);
            }
            Ok(results)
        })
    }

    /// Returns the bytes of one slice.
    pub fn pull(&self, job: &str, version: u64, dtype: Dtype, slice: v1::Slice) -> Result<Vec<u8>, Fault> {
        let request = v1::PullRequest {
            job: job.into(),
            rank: 0,
            version,
            dtype: dtype_to_wire(dtype),
            slices: vec![slice],
            deadline_ms: 5000,
            link: 0,
        };
        self.runtime.block_on(async {
            let fault = |status: Status| fault_from_status(&status, "the server");
            let mut answers = self.tensors.clone().pull(request).await.map_err(fault)?.into_inner();
            let mut bytes = Vec::new();
            while let Some(answer) = answers.message().await.map_err(fault)? {
                assert_eq!(crc32(&answer.payload), answer.crc32, "a pulled message's checksum");
                bytes.extend_from_slice(&answer.payload);
            }
            Ok(bytes)
        })
    }
}

/// Returns a valid chunk of zeros, the first of its shard. Tests change a field to make it invalid.
pub fn chunk(spec: &JobSpec, layout: &Layout, shard: u32, at: At) -> v1::PushRequest {
    let bytes = layout.shard_len(ShardId(shard)) * spec.gradient_dtype.bytes();
    let payload = Bytes::from(vec![0; bytes.min(1 << 20) as usize]);
    v1::PushRequest {
        job: spec.name.to_string(),
        incarnation: at.incarnation.0,
        rank: at.rank,
        step: at.step,
        micro_step: 0,
        shard,
        chunk: 0,
        loss_scale: 1.0,
        dtype: dtype_to_wire(spec.gradient_dtype),
        crc32: crc32(&payload),
        payload,
        ..v1::PushRequest::default()
    }
}

/// Returns a valid decision to apply `step`. Tests change a field to make it invalid.
pub fn decision(spec: &JobSpec, step: u64) -> Commit {
    Commit {
        step: Step(step),
        skip: false,
        gradient_scale: spec.contributions(spec.world_size) as f64,
        clip_coefficient: 1.0,
        correction: Correction::None,
        left_out: Vec::new(),
        groups: vec![Hyper::default(); spec.groups.len()],
        norm: 0.0,
        loss_scale: 1.0,
        trainer_state: Vec::new(),
        decided_by: Default::default(),
        pause_reason: String::new(),
        placement: None,
    }
}

/// Returns the placement that the worker library makes.
pub fn placement(addresses: &[String], layout: &Layout) -> Placement {
    Placement::striped(addresses.to_vec(), layout.shards())
}

/// Checks every field of a fault. `value` and `limit` need only be parts of the fault's texts.
#[track_caller]
pub fn assert_fault<T: std::fmt::Debug>(
    found: Result<T, Fault>,
    kind: FaultKind,
    field: &str,
    value: &str,
    limit: &str,
) {
    let fault = found.expect_err("it must be refused");
    let right = fault.kind == kind
        && fault.field == field
        && fault.value.contains(value)
        && fault.limit.contains(limit)
        && !fault.remedy.is_empty();
    assert!(right, "wanted {kind:?} of {field}: {value:?} against {limit:?}, but got {fault:?}");
}
