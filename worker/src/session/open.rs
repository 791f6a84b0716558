//! Opening a job on all servers, and telling a fresh job from a running one and from one that lost a part.

use std::time::{Duration, Instant};

use futures_util::future::try_join_all;
use longshore_proto::{
    Version,
    wire::v1::{DescribeRequest, DescribeResponse, JobProgress, OpenJobRequest, Phase},
};

use super::{Core, peer::whole, retry::Backoff};
use crate::error::{Result, StateLost, TimedOut};

/// What `open` found.
#[derive(Clone, Debug, PartialEq)]
pub enum Opened {
    /// No server has all of its weights yet: upload or restore.
    Fresh,
    /// Every server has state. Versions may differ by a commit that was under way; `join` settles that.
    Running {
        /// The smallest of the servers' versions.
        version: Version,
        /// Steps of that server that updated.
        applied: u64,
        /// The reason, when the job is paused.
        paused: Option<String>,
    },
}

impl Opened {
    pub fn is_fresh(&self) -> bool {
        matches!(self, Opened::Fresh)
    }
}

impl Core {
    pub(super) async fn open(&self) -> Result<Opened> {
        let progress = try_join_all((0..self.peers.len()).map(|server| self.open_on(server))).await?;
        self.judge(&progress)
    }

    pub(super) async fn open_on(&self, server: usize) -> Result<JobProgress> {
        let request = OpenJobRequest {
            spec: Some(self.spec().to_wire()),
            placement: Some(self.placement.to_wire()),
            server: server as u32,
        };
        // Slow: a server allocates and touches all of its memory before it answers.
        let answer = self.call(server, "OpenJob", None, self.options.slow_deadline, |peer| {
            let request = request.clone();
            async move { peer.training().open_job(request).await }
        });
        Ok(answer.await?.progress.unwrap_or_default())
    }

    /// All loading is fresh, all with state is running; a mixture beyond version 0 means that a server lost its part.
    /// At version 0 the mixture is an upload under way: servers begin to train one by one.
    pub(super) fn judge(&self, progress: &[JobProgress]) -> Result<Opened> {
        let loading = progress.iter().position(|progress| progress.phase() == Phase::Loading);
        let ahead = progress.iter().position(|progress| progress.version > 0);
        match (loading, ahead) {
            (Some(lost), Some(ahead)) => Err(StateLost {
                server: self.peers[lost].address.clone(),
                job: self.job().clone(),
                detail: format!(
                    "it waits for weights while server {} is at {}",
                    self.peers[ahead].address,
                    Version(progress[ahead].version)
                ),
            }
            .into()),
            (Some(_), None) => Ok(Opened::Fresh),
            (None, _) => {
                // `connect` refuses an empty list of servers.
                let least =
                    progress.iter().min_by_key(|progress| progress.version).cloned().unwrap_or_default();
                let paused = progress.iter().find(|progress| progress.phase() == Phase::Paused);
                Ok(Opened::Running {
                    version: Version(least.version),
                    applied: least.applied,
                    paused: paused.map(|progress| progress.pause_reason.clone()),
                })
            }
        }
    }

    pub(crate) async fn describe(
        &self,
        server: usize,
        state_hash: bool,
        deadline: Duration,
    ) -> Result<DescribeResponse> {
        let request = DescribeRequest { job: self.job().to_string(), state_hash, brief: true };
        self.call(server, "Describe", None, deadline, |peer| {
            let request = request.clone();
            async move {
                // Hashes of a large job exceed one message.
                if request.state_hash {
                    whole(peer.admin(), request).await
                } else {
                    peer.admin().describe(request).await
                }
            }
        })
        .await
    }

    pub(super) async fn describe_all(
        &self,
        state_hash: bool,
        deadline: Duration,
    ) -> Result<Vec<DescribeResponse>> {
        try_join_all((0..self.peers.len()).map(|server| self.describe(server, state_hash, deadline))).await
    }

    pub(super) async fn wait_training(&self) -> Result<()> {
        let start = Instant::now();
        let end = start + self.options.slow_deadline;
        let mut backoff = Backoff::new();
        loop {
            let answers = self.describe_all(false, self.options.deadline).await?;
            let progress: Vec<JobProgress> =
                answers.into_iter().map(|answer| answer.progress.unwrap_or_default()).collect();
            if !self.judge(&progress)?.is_fresh() {
                return Ok(());
            }
            if !backoff.pause(end).await {
                let slow =
                    progress.iter().position(|progress| progress.phase() == Phase::Loading).unwrap_or(0);
                return Err(TimedOut {
                    what: "rank 0 to upload or restore the initial weights",
                    server: Some(self.peers[slow].address.clone()),
                    job: self.job().clone(),
                    step: None,
                    shard: progress[slow]
                        .missing_shards
                        .first()
                        .map(|&shard| longshore_proto::ShardId(shard)),
                    version: Some(Version(0)),
                    waited: start.elapsed(),
                    last: None,
                }
                .into());
            }
        }
    }
}
