//! Opening a job on all servers, and telling a fresh job from a running one and from one that lost a part.

use std::time::{Duration, Instant};

use futures_util::future::try_join_all;
use longshore_proto::{FaultKind, Rank, Version};
use longshore_wire::{
    Wire,
    v1::{DescribeRequest, DescribeResponse, JobProgress, OpenJobRequest, Phase},
};

use super::{Core, peer::whole, retry::Backoff};
use crate::error::{Error, Result, StateLost, TimedOut};

/// What `open` found.
#[derive(Clone, Debug, PartialEq)]
pub enum Opened {
    /// No server has all of its weights yet: upload or restore. To ranks other than 0 all that is not `Running` is this: it
    /// is rank 0 that opens, restores and uploads, and what others see meanwhile says nothing.
    Fresh,
    /// A restore was begun here and has not ended: `restore` of the same checkpoint goes on with it.
    Restoring { checkpoint: String },
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
    /// Opens the job where it is, and creates it elsewhere unless a server is ahead that has trained: beside that, an empty
    /// job is a lost one, and creating it would hide what is missing.
    pub(super) async fn open(&self) -> Result<Opened> {
        let servers = 0..self.peers.len();
        let there = try_join_all(servers.map(|server| self.open_if_there(server))).await?;
        let absent = there.iter().any(Option::is_none);
        if absent && !there.iter().flatten().any(|progress| progress.version > 0) {
            return self.judge(&self.open_everywhere().await?);
        }
        let nothing = || JobProgress { phase: Phase::Loading.into(), ..JobProgress::default() };
        let progress: Vec<_> = there.into_iter().map(|progress| progress.unwrap_or_else(nothing)).collect();
        self.judge(&progress)
    }

    pub(super) async fn open_everywhere(&self) -> Result<Vec<JobProgress>> {
        try_join_all((0..self.peers.len()).map(|server| self.open_on(server))).await
    }

    /// Where the job stands on a server; None where it is not open.
    pub(super) async fn find(&self, server: usize) -> Result<Option<JobProgress>> {
        match self.describe(server, false, self.options.deadline).await {
            Ok(answer) => Ok(Some(answer.progress.unwrap_or_default())),
            Err(Error::StateLost(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn open_if_there(&self, server: usize) -> Result<Option<JobProgress>> {
        match self.find(server).await {
            Ok(None) => return Ok(None),
            Ok(Some(_)) => {}
            // It is there and could not be recovered: opening it tries again, and says why it fails.
            Err(Error::Call(failed))
                if !matches!(failed.fault.kind, FaultKind::Unavailable | FaultKind::Deadline) => {}
            Err(error) => return Err(error),
        }
        self.open_on(server).await.map(Some)
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
    /// At version 0 the mixture is an upload under way: servers begin to train one by one. That is rank 0's view, which acts on
    /// it; other ranks wait until all servers train.
    pub(super) fn judge(&self, progress: &[JobProgress]) -> Result<Opened> {
        let loading = progress.iter().position(|progress| progress.phase() == Phase::Loading);
        let ahead = progress.iter().position(|progress| progress.version > 0);
        let restore = progress.iter().find_map(|progress| progress.restore.as_ref());
        match (loading, ahead) {
            (Some(_), _) if self.options.rank != Rank(0) => Ok(Opened::Fresh),
            (Some(_), _) if restore.is_some() => {
                let checkpoint = restore.map(|restore| restore.name.clone()).unwrap_or_default();
                Ok(Opened::Restoring { checkpoint })
            }
            (Some(lost), Some(ahead)) => Err(StateLost {
                server: self.peers[lost].address.clone(),
                job: self.job().clone(),
                tier: self.spec().tier,
                detail: format!(
                    "it holds nothing of it while server {} is at {}",
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

    /// Waits until every server trains. Ranks other than 0 also wait for rank 0 to open the job, and while it gives up one
    /// state for another.
    pub(super) async fn wait_training(&self) -> Result<()> {
        let start = Instant::now();
        let end = start + self.options.slow_deadline;
        let mut backoff = Backoff::new();
        loop {
            let there = try_join_all((0..self.peers.len()).map(|server| self.find(server))).await?;
            if let Some(absent) = there.iter().position(Option::is_none)
                && self.options.rank == Rank(0)
            {
                let detail = "it is not open there any more".into();
                let server = self.peers[absent].address.clone();
                let (job, tier) = (self.job().clone(), self.spec().tier);
                return Err(StateLost { server, job, tier, detail }.into());
            }
            let known: Vec<JobProgress> = there.iter().flatten().cloned().collect();
            let whole = known.len() == there.len();
            if matches!(self.judge(&known)?, Opened::Running { .. }) && whole {
                return Ok(());
            }
            if !backoff.pause(end).await {
                return Err(self.not_training(&there, start));
            }
        }
    }

    /// Names the first server that does not train, and what is seen there.
    fn not_training(&self, there: &[Option<JobProgress>], start: Instant) -> Error {
        let idle = |progress: &Option<JobProgress>| {
            progress.as_ref().is_none_or(|progress| progress.phase() == Phase::Loading)
        };
        let slow = there.iter().position(idle).unwrap_or(0);
        let missing = there[slow].as_ref().and_then(|progress| progress.missing_shards.first());
        TimedOut {
            what: "rank 0 to open the job and to upload or restore its weights",
            server: Some(self.peers[slow].address.clone()),
            job: self.job().clone(),
            step: None,
            shard: missing.map(|&shard| longshore_proto::ShardId(shard)),
            version: Some(Version(0)),
            waited: start.elapsed(),
            last: None,
        }
        .into()
    }
}
