//! Calls servers. A call is tried again as long as only the transport fails. A server's fault becomes the error that
//! says most about it.

use std::{
    future::Future,
    time::{Duration, Instant},
};

use futures_util::future::{join_all, try_join_all};
use longshore_proto::{
    Fault, FaultKind, ServerId, Step,
    fault::{ORIGIN, READS},
};
use longshore_wire::{
    fault_from_status,
    v1::{DescribeRequest, DescribeResponse},
};
use tonic::{Response, Status};

use super::{
    ByServer, Cluster, Peer,
    peer::{SILENCE, whole},
    retry::Backoff,
};
use crate::error::{CallFailed, Error, Fenced, Outdated, Result, StateLost};

impl Cluster {
    /// Calls one server until it answers, for at most `deadline`. After a failure of the transport it tries again for
    /// the session's deadline at most, even in a call that may itself take longer. That time counts from the first
    /// failure of a row; a call that the server had been working on for long begins a new row. A server that recovers the
    /// job is alive, and reads all of its state: it is asked again for `slow_deadline`, and then has `deadline` to answer.
    /// `call` is the RPC's name, for errors. `request` must be idempotent, as all of the protocol's control calls are.
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

    async fn call_for<T, F, Answer>(
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
        // The time for an answer, and for the job to be recovered.
        let (deadline, recovery) = patience;
        let (mut end, mut give_up) = (Instant::now() + deadline, None);
        let recovered = Instant::now() + recovery;
        let mut backoff = Backoff::new();
        loop {
            let (peer, begun) = (&self.peers[server], Instant::now());
            let fault = match tokio::time::timeout_at(end.into(), request(peer.clone())).await {
                Ok(Ok(response)) => return Ok(response.into_inner()),
                Ok(Err(status)) => fault_from_status(&status, &peer.address),
                Err(_) => {
                    let remedy =
                        "see what the server waits for with `longshore status`, or raise the deadline";
                    Fault::new(
                        FaultKind::Deadline,
                        call,
                        format!("unanswered after {deadline:?}"),
                        "answered",
                        remedy,
                    )
                }
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
        }
    }

    /// Turns a server's fault into the error that says most.
    pub(crate) fn explain(
        &self,
        server: ServerId,
        call: &'static str,
        step: Option<Step>,
        fault: Fault,
    ) -> Error {
        let server = self.address(server).to_string();
        let job = self.job().clone();
        match fault.kind {
            // Other things may be missing on their own, such as a checkpoint or a version.
            FaultKind::NotFound if fault.field == "job" && call != "DeleteJob" => {
                StateLost { server, job, tier: self.spec().tier, detail: fault.to_string() }.into()
            }
            FaultKind::Fenced => Fenced { server, job, fault }.into(),
            FaultKind::Conflict if [READS, ORIGIN].contains(&&*fault.field) => {
                Outdated { server, job, fault }.into()
            }
            FaultKind::NotFound if fault.field == "version" && call == "Pull" => {
                Outdated { server, job, fault }.into()
            }
            _ => CallFailed { server, job, call, step, fault }.into(),
        }
    }

    /// Does the same on every server at once. The first failure ends the others.
    pub(crate) async fn on_all<T, Act>(&self, act: impl Fn(ServerId) -> Act) -> Result<ByServer<T>>
    where
        Act: Future<Output = Result<T>>,
    {
        Ok(try_join_all(self.servers().map(act)).await?.into_iter().collect())
    }

    /// Does the same on every server at once, and waits for each to end, also after a failure of another one.
    pub(crate) async fn on_each<Act: Future>(&self, act: impl Fn(ServerId) -> Act) -> ByServer<Act::Output> {
        join_all(self.servers().map(act)).await.into_iter().collect()
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

    /// Asks a server how it stands, while something else is waited for: neither one that is gone nor one that recovers the
    /// job is waited for.
    pub(crate) async fn glance(&self, server: ServerId) -> Result<DescribeResponse> {
        const GLANCE: Duration = Duration::from_secs(2);
        self.describe_for(server, false, (GLANCE, Duration::ZERO)).await
    }

    async fn describe_for(
        &self,
        server: ServerId,
        state_hash: bool,
        patience: (Duration, Duration),
    ) -> Result<DescribeResponse> {
        let request =
            DescribeRequest { job: self.job().to_string(), state_hash, brief: true, ..Default::default() };
        self.call_for(server, "Describe", None, patience, |peer| {
            let request = request.clone();
            async move {
                // The hashes of a large job exceed one message.
                if request.state_hash {
                    whole(peer.admin(), request).await
                } else {
                    peer.admin().describe(request).await
                }
            }
        })
        .await
    }

    pub(crate) async fn describe_all(
        &self,
        state_hash: bool,
        deadline: Duration,
    ) -> Result<ByServer<DescribeResponse>> {
        self.on_all(|server| self.describe(server, state_hash, deadline)).await
    }
}

/// Whether the server says that it recovers the job. Faults of the transport have other fields.
pub(super) fn recovers(fault: &Fault) -> bool {
    fault.kind == FaultKind::Unavailable && fault.field == "job"
}
