//! Operators' calls over all servers of a job: restore, hash, pause, delete.

use std::{
    future::Future,
    time::{Duration, Instant},
};

use futures_util::future::{join_all, try_join_all};
use longshore_proto::{
    Version,
    checksum::{BlockHash, state_hash},
    limits::MAX_PAUSE_REASON_BYTES,
    wire::v1::{DeleteJobRequest, DescribeResponse, PauseRequest, RestoreRequest, ResumeRequest},
};
use tonic::{Response, Status};

use super::{Core, peer::Peer, retry::Backoff};
use crate::error::{Error, MissingBlock, NotRestored, Result, VersionsDiffer};

/// The hash of all state of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateHash {
    pub version: Version,
    /// Steps that updated.
    pub applied: u64,
    /// 32 hexadecimal digits.
    pub hash: String,
}

impl Core {
    /// One call to every server at once.
    async fn everywhere<T, F, Answer>(
        &self,
        call: &'static str,
        deadline: Duration,
        request: F,
    ) -> Result<Vec<T>>
    where
        F: Fn(Peer) -> Answer,
        Answer: Future<Output = Result<Response<T>, Status>>,
    {
        let request = &request;
        try_join_all((0..self.peers.len()).map(|server| self.call(server, call, None, deadline, request)))
            .await
    }

    pub(super) async fn state_hash(&self) -> Result<StateHash> {
        let start = Instant::now();
        let end = start + self.options.slow_deadline;
        let mut backoff = Backoff::new();
        loop {
            let answers = self.describe_all(true, self.options.slow_deadline).await?;
            let agree = answers.iter().all(|answer| answer.hash_version == answers[0].hash_version);
            if agree {
                return self.combine(&answers);
            }
            if !backoff.pause(end).await {
                let versions = self.peers.iter().zip(&answers);
                let versions =
                    versions.map(|(peer, answer)| (peer.address.clone(), Version(answer.hash_version)));
                return Err(VersionsDiffer {
                    job: self.job().clone(),
                    versions: versions.collect(),
                    waited: start.elapsed(),
                }
                .into());
            }
        }
    }

    fn combine(&self, answers: &[DescribeResponse]) -> Result<StateHash> {
        let version = Version(answers[0].hash_version);
        let applied = answers[0].hash_applied;
        let mut blocks: Vec<Option<BlockHash>> = vec![None; self.layout.blocks() as usize];
        for hash in answers.iter().flat_map(|answer| &answer.hashes) {
            if let Some(slot) = blocks.get_mut(hash.block as usize) {
                *slot = hash.hash.as_ref().try_into().ok();
            }
        }
        if let Some(block) = blocks.iter().position(Option::is_none) {
            return Err(MissingBlock { job: self.job().clone(), block: block as u32, version }.into());
        }
        let hash = state_hash(version, applied, blocks.iter().flatten());
        Ok(StateHash { version, applied, hash })
    }

    /// All servers' parts, or none: after a failure those that were restored are deleted again.
    pub(super) async fn restore(&self, name: &str) -> Result<Version> {
        let start = Instant::now();
        let request = RestoreRequest { job: self.job().to_string(), name: name.into() };
        // To the end everywhere: a server goes on restoring whether it is listened to or not.
        let answers = join_all((0..self.peers.len()).map(|server| {
            self.call(server, "Restore", None, self.options.slow_deadline, |peer| {
                let request = request.clone();
                async move { peer.admin().restore(request).await }
            })
        }));
        let (mut restored, mut failure) = (Vec::new(), None);
        for (server, answer) in answers.await.into_iter().enumerate() {
            match answer {
                Ok(answer) => restored.push((server, Version(answer.progress.unwrap_or_default().version))),
                Err(error) => failure = failure.or(Some(error)),
            }
        }
        let differ = restored.iter().any(|(_, version)| *version != restored[0].1);
        let cause = match failure {
            Some(error) => error,
            None if differ => {
                let address =
                    |&(server, version): &(usize, Version)| (self.peers[server].address.clone(), version);
                let versions = restored.iter().map(address).collect();
                VersionsDiffer { job: self.job().clone(), versions, waited: start.elapsed() }.into()
            }
            None => return Ok(restored[0].1),
        };
        Err(self.take_back(restored.into_iter().map(|(server, _)| server).collect(), cause).await)
    }

    /// Deletes the job on the servers that had restored it.
    async fn take_back(&self, restored: Vec<usize>, cause: Error) -> Error {
        let deleted = join_all(restored.iter().map(|&server| self.delete_job_on(server))).await;
        let (mut undone, mut left) = (Vec::new(), Vec::new());
        for (server, deleted) in restored.into_iter().zip(deleted) {
            let address = self.peers[server].address.clone();
            match deleted {
                Ok(()) => undone.push(address),
                Err(error) => left.push((address, error)),
            }
        }
        if undone.is_empty() && left.is_empty() {
            return cause;
        }
        NotRestored { job: self.job().clone(), undone, left, cause }.into()
    }

    pub(super) async fn delete_job(&self) -> Result<()> {
        try_join_all((0..self.peers.len()).map(|server| self.delete_job_on(server))).await?;
        Ok(())
    }

    async fn delete_job_on(&self, server: usize) -> Result<()> {
        let request = DeleteJobRequest { job: self.job().to_string() };
        self.call(server, "DeleteJob", None, self.options.deadline, |peer| {
            let request = request.clone();
            async move { peer.admin().delete_job(request).await }
        })
        .await?;
        Ok(())
    }

    pub(crate) async fn pause_all(&self, reason: &str) -> Result<()> {
        let mut reason = reason.to_string();
        reason.truncate(reason.floor_char_boundary(MAX_PAUSE_REASON_BYTES));
        let request = PauseRequest { job: self.job().to_string(), incarnation: self.incarnation().0, reason };
        self.everywhere("Pause", self.options.deadline, |peer| {
            let request = request.clone();
            async move { peer.training().pause(request).await }
        })
        .await?;
        Ok(())
    }

    pub(super) async fn resume_all(&self, loss_scale: Option<f64>) -> Result<()> {
        let request = ResumeRequest { job: self.job().to_string(), loss_scale: loss_scale.unwrap_or(0.0) };
        self.everywhere("Resume", self.options.deadline, |peer| {
            let request = request.clone();
            async move { peer.admin().resume(request).await }
        })
        .await?;
        Ok(())
    }
}
