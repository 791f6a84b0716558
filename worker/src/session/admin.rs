//! Operators' calls over all servers of a job: hash, pause, delete.

use std::{
    future::Future,
    sync::atomic::{AtomicUsize, Ordering},
    time::{Duration, Instant},
};

use futures_util::future::try_join_all;
use longshore_proto::{
    FaultKind, Version,
    checksum::{BlockHash, state_hash},
    limits::MAX_PAUSE_REASON_BYTES,
};
use longshore_wire::v1::{DeleteJobRequest, DescribeResponse, PauseRequest};
use tonic::{Response, Status};

use super::{Core, peer::Peer, retry::Backoff};
use crate::error::{Error, MissingBlock, Result, VersionsDiffer};

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
    pub(super) async fn everywhere<T, F, Answer>(
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

    pub(super) async fn delete_job(&self) -> Result<()> {
        try_join_all((0..self.peers.len()).map(|server| self.delete_job_on(server))).await?;
        Ok(())
    }

    pub(super) async fn delete_job_on(&self, server: usize) -> Result<()> {
        let request = DeleteJobRequest { job: self.job().to_string(), discard_unreadable: false };
        let attempts = AtomicUsize::new(0);
        let deleted = self.call(server, "DeleteJob", None, self.options.deadline, |peer| {
            let request = request.clone();
            attempts.fetch_add(1, Ordering::Relaxed);
            async move { peer.admin().delete_job(request).await }
        });
        match deleted.await {
            // Gone with an attempt whose answer was lost.
            Err(Error::Call(failed))
                if failed.fault.kind == FaultKind::NotFound && attempts.load(Ordering::Relaxed) > 1 =>
            {
                Ok(())
            }
            deleted => deleted.map(|_| ()),
        }
    }

    pub(super) async fn pause_all(&self, reason: &str) -> Result<()> {
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
}
