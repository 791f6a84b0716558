//! Checkpoints over all servers of a job: whether one could be written, writing and sealing, and the list of them.

use std::time::Instant;

use futures_util::future::{join_all, try_join_all};
use longshore_proto::{Fault, FaultKind, JobName, Version};
use longshore_wire::v1::{
    CheckpointRequest, CheckpointResponse, DiscardCheckpointRequest, ListCheckpointsRequest,
    ListCheckpointsResponse, SealCheckpointRequest, SealCheckpointResponse,
};

use super::{
    Checkpoint, Core, TRIES,
    checkpoints::{common, numbered, unsealed_but_whole},
    has_passed, lead,
};
use crate::error::{Error, Result, TimedOut};

impl Core {
    /// What every server lists, as one list. Seals what servers have written that were drained and do not share a folder: they
    /// cannot tell each other.
    pub(super) async fn list_checkpoints(&self) -> Result<Vec<Checkpoint>> {
        let mut lists = self.lists().await?;
        let whole = unsealed_but_whole(lists.iter().flat_map(|list| &list.unsealed));
        for (name, parts) in &whole {
            if let Err(error) = self.seal(name, parts.clone()).await {
                tracing::debug!(job = %self.job(), name, %error, "parts of all servers were not sealed");
            }
        }
        if !whole.is_empty() {
            lists = self.lists().await?;
        }
        let addresses = self.peers.iter().map(|peer| peer.address.clone());
        Ok(common(addresses.zip(lists.into_iter().map(|list| list.checkpoints)).collect()))
    }

    async fn lists(&self) -> Result<Vec<ListCheckpointsResponse>> {
        let request = ListCheckpointsRequest { job: self.job().to_string() };
        let answers = (0..self.peers.len()).map(|server| {
            let request = &request;
            self.call(server, "ListCheckpoints", None, self.options.deadline, move |peer| {
                let request = request.clone();
                async move { peer.admin().list_checkpoints(request).await }
            })
        });
        try_join_all(answers).await
    }

    /// Whether every server could write its part now.
    pub(super) async fn check_room(&self) -> Result<()> {
        let request = CheckpointRequest { job: self.job().to_string(), check: true, ..Default::default() };
        self.parts_of(&request).await?;
        Ok(())
    }

    /// Under `name`, or where that is taken by another state, as after a rollback, under the first of name.2, name.3, ... that
    /// is not.
    pub(super) async fn checkpoint_numbered(&self, name: &str) -> Result<Checkpoint> {
        let mut names = numbered(name);
        loop {
            let Some(name) = names.next() else { return self.checkpoint(name).await };
            match self.checkpoint(&name).await {
                Err(Error::Call(failed)) if is_taken(&failed.fault) => {}
                written => return written,
            }
        }
    }

    pub(super) async fn checkpoint(&self, name: &str) -> Result<Checkpoint> {
        let name = JobName::parse("checkpoint.name", name)?;
        let written = self.write_and_seal(name.as_str()).await;
        match &written {
            // A server that is not there cannot be asked to discard either.
            Err(Error::Call(failed)) if failed.fault.kind == FaultKind::Unavailable => {}
            Err(Error::Call(_) | Error::TimedOut(_)) => self.discard(name.as_str()).await,
            _ => {}
        }
        written
    }

    async fn write_and_seal(&self, name: &str) -> Result<Checkpoint> {
        let start = Instant::now();
        let end = start + self.options.slow_deadline;
        let mut tried = 0;
        let parts = loop {
            match self.parts(name, lead(tried)).await {
                // A commit came between: the version named is no longer the current one.
                Err(Error::Call(failed)) if has_passed(&failed.fault) => {
                    tried += 1;
                    if tried == TRIES || Instant::now() > end {
                        return Err(self.moving_target(start, failed.fault));
                    }
                }
                other => break other?,
            }
        };
        let version = Version(parts.first().map_or(0, |part| part.version));
        let sealed = self.seal(name, parts.into_iter().map(|part| part.part).collect()).await?;
        let shared = sealed.iter().all(|sealed| sealed.visible_parts == sealed.parts);
        Ok(Checkpoint { name: name.to_string(), version, shared, stale: false, damage: None })
    }

    /// Every server's part, all of one version: the newest, or one so many steps on.
    async fn parts(&self, name: &str, lead: u64) -> Result<Vec<CheckpointResponse>> {
        let answers = self.describe_all(false, self.options.deadline).await?;
        let version = answers
            .iter()
            .filter_map(|answer| answer.progress.as_ref())
            .map(|progress| progress.version)
            .max()
            .unwrap_or(0);
        let request = CheckpointRequest {
            job: self.job().to_string(),
            name: name.into(),
            version: version + lead,
            check: false,
        };
        self.parts_of(&request).await
    }

    /// To the end everywhere: a server goes on writing whether it is listened to or not.
    async fn parts_of(&self, request: &CheckpointRequest) -> Result<Vec<CheckpointResponse>> {
        let answers = join_all((0..self.peers.len()).map(|server| {
            self.call(server, "Checkpoint", None, self.options.slow_deadline, move |peer| {
                let request = request.clone();
                async move { peer.admin().checkpoint(request).await }
            })
        }));
        answers.await.into_iter().collect()
    }

    async fn seal(&self, name: &str, parts: Vec<String>) -> Result<Vec<SealCheckpointResponse>> {
        let request = SealCheckpointRequest { job: self.job().to_string(), name: name.to_string(), parts };
        let answers = join_all((0..self.peers.len()).map(|server| {
            let request = &request;
            self.call(server, "SealCheckpoint", None, self.options.slow_deadline, move |peer| {
                let request = request.clone();
                async move { peer.admin().seal_checkpoint(request).await }
            })
        }));
        answers.await.into_iter().collect()
    }

    /// Gives back the room of parts that were written, since not all were. Where that fails too, the next checkpoint that is
    /// sealed does it.
    async fn discard(&self, name: &str) {
        let request = DiscardCheckpointRequest { job: self.job().to_string(), name: name.to_string() };
        let discarded = join_all((0..self.peers.len()).map(|server| {
            let request = &request;
            self.call(server, "DiscardCheckpoint", None, self.options.deadline, move |peer| {
                let request = request.clone();
                async move { peer.admin().discard_checkpoint(request).await }
            })
        }));
        for error in discarded.await.into_iter().filter_map(Result::err) {
            tracing::debug!(job = %self.job(), name, %error, "an unsealed part was not removed");
        }
    }

    fn moving_target(&self, start: Instant, fault: Fault) -> Error {
        TimedOut {
            what: "a version that all servers can checkpoint",
            server: None,
            job: self.job().clone(),
            step: None,
            shard: None,
            version: None,
            waited: start.elapsed(),
            last: Some(fault),
        }
        .into()
    }
}

/// Whether the name is a sealed checkpoint's of another state.
pub fn is_taken(fault: &Fault) -> bool {
    fault.kind == FaultKind::Conflict && fault.field == "name"
}
