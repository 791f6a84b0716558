//! Calls one server or all servers, for every act of a session. A failed transport leads to another attempt. A
//! server's fault becomes the most specific `Error`.

use std::{future::Future, sync::atomic::Ordering::Relaxed, time::Duration};

use futures_util::future::{Either, join_all, select, try_join_all};
use longshore_proto::{
    Fault, FaultKind, ServerId, Step,
    fault::{ORIGIN, READS},
};
use longshore_wire::{
    fault_from_status,
    v1::{DescribeRequest, DescribeResponse, ListJobsRequest},
};
use tonic::{Response, Status};

use super::{
    ByServer, Cluster, Peer,
    peer::{SILENCE, whole},
    retry::Backoff,
};
use crate::{
    error::{CallFailed, Error, Fenced, Outdated, Result, StateLost},
    host::{self, Instant},
};

/// Field of a fault: the server was restarted, and lacks a job that other servers hold.
pub(super) const FORGOTTEN: &str = "state";
/// The longest wait of a call whose caller has other work.
const GLANCE: Duration = Duration::from_secs(2);

impl Cluster {
    /// Calls one server until it answers, for at most `deadline`. `call` is the RPC's name, for errors. `request`
    /// must be idempotent, as all control calls of the protocol are.
    ///
    /// After a failed transport, attempts go on for the session's deadline, even if `deadline` is longer. The session's
    /// deadline counts from the first of consecutive failures. An attempt that failed after more than `SILENCE` starts
    /// the count anew: the server was alive meanwhile.
    ///
    /// A server that recovers the job reads all of its state. The call is then repeated for up to `slow_deadline`.
    /// After the recovery the server has `deadline` to answer.
    pub(crate) async fn call<T, F, Answer>(
        &self,
        server: ServerId,
        call: &'static str,
        step: Option<Step>,
        deadline: Duration,
        request: F,
    ) -> Result<T>
    where
        F: Fn(Peer) -> Answer,
        Answer: Future<Output = Result<Response<T>, Status>>,
    {
        let recovery = self.options.slow_deadline.max(deadline);
        self.call_for(server, call, step, (deadline, recovery), request).await
    }

    /// Acts as [`Cluster::call`]. `patience` has the deadline of the answer, and the deadline of the server's recovery.
    pub(crate) async fn call_for<T, F, Answer>(
        &self,
        server: ServerId,
        call: &'static str,
        step: Option<Step>,
        patience: (Duration, Duration),
        request: F,
    ) -> Result<T>
    where
        F: Fn(Peer) -> Answer,
        Answer: Future<Output = Result<Response<T>, Status>>,
    {
        let (deadline, recovery) = patience;
        let (mut end, mut give_up) = (Instant::now() + deadline, None);
        let recovered = Instant::now() + recovery;
        let (mut backoff, mut refused) = (Backoff::new(), None);
        loop {
            let (peer, begun) = (&self.peers[server], Instant::now());
            let fault = match host::timeout_at(end, request(peer.clone())).await {
                Ok(Ok(response)) => return Ok(response.into_inner()),
                // A repeated deletion finds no job, which is no loss of state.
                Ok(Err(status)) if call == "DeleteJob" => fault_from_status(&status, &peer.address),
                Ok(Err(status)) => self.fault(server, &status),
                // An earlier refusal names a cause, so it is returned instead of the late answer.
                Err(_) => refused.take().unwrap_or_else(|| {
                    let value = format!("unanswered after {deadline:?}");
                    let remedy = "see what the server waits for with `longshore status`, or raise the deadline \
                                  (--deadline-s of train and export; deadline= in Python)";
                    Fault::new(FaultKind::Deadline, call, value, "answered", remedy)
                }),
            };
            let retry = fault.kind == FaultKind::Unavailable;
            if recovers(&fault) && backoff.pause(recovered).await {
                tracing::debug!(server = peer.address, call, "the server recovers the job");
                (end, give_up) = (Instant::now() + deadline, None);
                continue;
            }
            if begun.elapsed() > SILENCE {
                give_up = None;
            }
            let give_up = *give_up.get_or_insert_with(|| end.min(Instant::now() + self.options.deadline));
            if !retry || !backoff.pause(give_up).await {
                return Err(self.explain(server, call, step, fault));
            }
            tracing::debug!(server = peer.address, call, %fault, "the call failed, trying again");
            refused = Some(fault);
        }
    }

    /// Returns the fault of a server's answer. A server that lacks the job was restarted, or the job is deleted. If
    /// other servers hold the server's shards, the fault becomes `Unavailable`, since rank 0 gives the server up.
    pub(crate) fn fault(&self, server: ServerId, status: &Status) -> Fault {
        let fault = fault_from_status(status, self.address(server));
        let is_gone = fault.kind == FaultKind::NotFound && fault.field == "job";
        if !is_gone || self.spec().replicas == 1 || !self.trained.load(Relaxed) {
            return fault;
        }
        if !self.is_made_up_for(server) {
            return fault;
        }
        let (limit, remedy) = ("still known there", "rank 0 gives the server up");
        Fault::new(FaultKind::Unavailable, FORGOTTEN, self.job(), limit, remedy)
    }

    /// Maps a server's fault to the most specific error.
    pub(crate) fn explain(
        &self,
        server: ServerId,
        call: &'static str,
        step: Option<Step>,
        fault: Fault,
    ) -> Error {
        let (tier, address) = (self.tier(server), self.address(server).to_string());
        let job = self.job().clone();
        match (fault.kind, &*fault.field, call) {
            // Checkpoints and versions can be missing while the job is there.
            (FaultKind::NotFound, "job", call) if call != "DeleteJob" => {
                StateLost { server: address, job, tier, detail: fault.to_string() }.into()
            }
            (FaultKind::Fenced, ..) => Fenced { server: address, job, fault }.into(),
            // A server keeps only the newest commits. If it lacks the commits after this rank's step, other processes
            // have trained since.
            (FaultKind::Conflict, READS | ORIGIN, _)
            | (FaultKind::Conflict, "placement.epoch", "Join")
            | (FaultKind::NotFound, "version", "Pull")
            | (FaultKind::NotFound, "after_step", _) => self.outdated(server, fault),
            _ => CallFailed { server: address, job, call, step, fault }.into(),
        }
    }

    /// Returns `Outdated`: the server went on with other data than this process holds.
    pub(crate) fn outdated(&self, server: ServerId, fault: Fault) -> Error {
        Outdated { server: self.address(server).to_string(), job: self.job().clone(), fault }.into()
    }

    /// Runs `act` on every server concurrently. The first failure cancels the other calls. The result lacks servers
    /// that are given up meanwhile.
    pub(crate) async fn on_all<T, Act>(&self, act: impl Fn(ServerId) -> Act) -> Result<ByServer<T>>
    where
        Act: Future<Output = Result<T>>,
    {
        let servers = self.servers();
        let answers = servers.clone().map(|server| self.unless_lost(server, act(server)));
        let answers = servers.zip(try_join_all(answers).await?);
        Ok(answers.filter_map(|(server, answer)| Some((server, answer?))).collect())
    }

    /// Awaits a server's answer. Returns None if the server is given up.
    pub(crate) async fn unless_lost<T>(
        &self,
        server: ServerId,
        answer: impl Future<Output = Result<T>>,
    ) -> Result<Option<T>> {
        if self.spec().replicas == 1 {
            return answer.await.map(Some);
        }
        let (answer, left) = (std::pin::pin!(answer), std::pin::pin!(self.left(server)));
        match select(answer, left).await {
            Either::Left((Ok(answer), _)) => Ok(Some(answer)),
            Either::Left((Err(error), _)) => {
                if matches!(&error, Error::Call(failed) if failed.fault.kind == FaultKind::Unavailable) {
                    // Rank 0 may have given the server up since this rank last asked.
                    self.hear_of_losses().await;
                }
                if self.has_left(server) { Ok(None) } else { Err(error) }
            }
            Either::Right(_) => Ok(None),
        }
    }

    /// Runs `act` on every server concurrently, and waits for each to end, whether others fail or not.
    pub(crate) async fn on_each<Act: Future>(&self, act: impl Fn(ServerId) -> Act) -> ByServer<Act::Output> {
        let servers = self.servers();
        let answers = join_all(servers.clone().map(act)).await;
        servers.zip(answers).collect()
    }

    /// Asks a server to describe the job.
    pub(crate) async fn describe(
        &self,
        server: ServerId,
        state_hash: bool,
        deadline: Duration,
    ) -> Result<DescribeResponse> {
        self.describe_for(server, state_hash, (deadline, self.options.slow_deadline.max(deadline))).await
    }

    /// Describes the job on a server within 2 s, for a caller with other work. A dead or recovering server is an
    /// error.
    pub(crate) async fn glance(&self, server: ServerId) -> Result<DescribeResponse> {
        self.describe_for(server, false, (GLANCE, Duration::ZERO)).await
    }

    /// Returns a server's clock, in ms since 1970. None if the server does not tell its clock within 2 s.
    pub(crate) async fn clock(&self, server: ServerId) -> Option<u64> {
        let ask = |peer: Peer| async move { peer.admin().list_jobs(ListJobsRequest::default()).await };
        let asked = self.call_for(server, "ListJobs", None, (GLANCE, Duration::ZERO), ask).await;
        asked.ok().map(|answer| answer.unix_micros / 1000).filter(|&now| now > 0)
    }

    async fn describe_for(
        &self,
        server: ServerId,
        state_hash: bool,
        patience: (Duration, Duration),
    ) -> Result<DescribeResponse> {
        let request =
            DescribeRequest { job: self.job().to_string(), state_hash, brief: true, ..Default::default() };
        let answer = self.call_for(server, "Describe", None, patience, |peer| {
            let request = request.clone();
            async move {
                // The hashes of a large job exceed one message.
                if request.state_hash {
                    whole(peer.admin(), request).await
                } else {
                    peer.admin().describe(request).await
                }
            }
        });
        answer.await.inspect(|answer| self.keeps(server, answer.tier))
    }

    pub(crate) async fn describe_all(
        &self,
        state_hash: bool,
        deadline: Duration,
    ) -> Result<ByServer<DescribeResponse>> {
        self.on_all(|server| self.describe(server, state_hash, deadline)).await
    }
}

/// Returns true if the server recovers the job. Faults of the transport have other fields.
pub(super) fn recovers(fault: &Fault) -> bool {
    fault.kind == FaultKind::Unavailable && fault.field == "job"
}
