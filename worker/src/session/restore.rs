//! A restore as one act over all servers: every one loads its part and holds it, and only when all do, they start. So a fault, a
//! lost answer or the end of the one who asked leaves a job that waits, and asking again goes on from there.

use std::time::{Duration, Instant};

use futures_util::future::{join_all, try_join_all};
use longshore_proto::{FaultKind, JobName, Version};
use longshore_wire::v1::{Phase, RestoreMode, RestoreRequest, RestoreResponse};

use super::Core;
use crate::error::{Error, NotRestored, OtherCheckpoints, Result};

/// How long a server lets one call wait. Then it is asked how far it is, and waited for again.
const ONE_WAIT: Duration = Duration::from_secs(10);

impl Core {
    /// Fills the job from a checkpoint on every server, or on none. A job that is at the checkpoint's state already is left as
    /// it is.
    pub(super) async fn restore(&self, name: &str) -> Result<Version> {
        let name = JobName::parse("checkpoint.name", name)?;
        let name = name.as_str();
        // To the end everywhere: a server goes on loading whether it is listened to or not.
        let servers = 0..self.peers.len();
        let held = servers.map(|server| self.restore_on(server, name, RestoreMode::Hold));
        let (mut loaded, mut failure) = (Vec::new(), None);
        for (server, answer) in join_all(held).await.into_iter().enumerate() {
            match answer {
                Ok(answer) => loaded.push((server, answer)),
                Err(error) => failure = failure.or(Some(error)),
            }
        }
        let failure = failure.or_else(|| self.check_alike(name, &loaded).err());
        if let Some(cause) = failure {
            return Err(self.take_back(name, loaded, cause).await);
        }
        let servers = 0..self.peers.len();
        try_join_all(servers.map(|server| self.restore_on(server, name, RestoreMode::Whole))).await?;
        Ok(loaded.first().map_or(Version(0), |(_, answer)| Version(answer.version)))
    }

    /// What each server knows of a checkpoint without reading its tensors; an error where one cannot restore it.
    pub(super) async fn check_checkpoint(&self, name: &str) -> Result<RestoreResponse> {
        let servers = 0..self.peers.len();
        let check = |server| async move {
            Ok::<_, Error>((server, self.restore_on(server, name, RestoreMode::Check).await?))
        };
        let mut answers = try_join_all(servers.map(check)).await?;
        self.check_alike(name, &answers)?;
        // `connect` refuses an empty list of servers.
        Ok(answers.swap_remove(0).1)
    }

    /// Reads and compares all that the servers need of a checkpoint. The job must be open on all of them.
    pub(super) async fn verify_checkpoint(&self, name: &str) -> Result<()> {
        let servers = 0..self.peers.len();
        try_join_all(servers.map(|server| self.restore_on(server, name, RestoreMode::Verify))).await?;
        Ok(())
    }

    /// One act on one server, for as long as it gets on.
    async fn restore_on(&self, server: usize, name: &str, mode: RestoreMode) -> Result<RestoreResponse> {
        let one_wait = ONE_WAIT.min(self.options.slow_deadline);
        let request = RestoreRequest {
            job: self.job().to_string(),
            name: name.into(),
            mode: mode.into(),
            deadline_ms: one_wait.as_millis() as u64,
        };
        let (mut since, mut shards) = (Instant::now(), 0);
        loop {
            let answer = self.call(server, "Restore", None, one_wait + self.options.deadline, |peer| {
                let request = request.clone();
                async move { peer.admin().restore(request).await }
            });
            let late = match answer.await {
                Err(Error::Call(failed)) if failed.fault.kind == FaultKind::Deadline => failed,
                other => return other,
            };
            let now = self.shards_restored(server).await;
            if now > shards {
                (since, shards) = (Instant::now(), now);
            } else if since.elapsed() >= self.options.slow_deadline {
                return Err(Error::Call(late));
            }
        }
    }

    async fn shards_restored(&self, server: usize) -> u32 {
        let answer = self.describe(server, false, self.options.deadline).await;
        let progress = answer.ok().and_then(|answer| answer.progress?.restore);
        progress.map_or(0, |restore| restore.shards)
    }

    fn check_alike(&self, name: &str, answers: &[(usize, RestoreResponse)]) -> Result<()> {
        if answers.iter().all(|(_, answer)| answer.id == answers[0].1.id) {
            return Ok(());
        }
        let of = |(server, answer): &(usize, RestoreResponse)| {
            (self.peers[*server].address.clone(), Version(answer.version))
        };
        let versions = answers.iter().map(of).collect();
        Err(OtherCheckpoints { job: self.job().clone(), checkpoint: name.into(), versions }.into())
    }

    /// Has the servers that hold their part give it up, unless the failure may pass: then asking again goes on from there.
    async fn take_back(&self, name: &str, loaded: Vec<(usize, RestoreResponse)>, cause: Error) -> Error {
        let holds = |answer: &RestoreResponse| {
            answer.progress.as_ref().is_some_and(|progress| progress.phase() == Phase::Loading)
        };
        let holding: Vec<usize> =
            loaded.iter().filter(|(_, answer)| holds(answer)).map(|(server, _)| *server).collect();
        if holding.is_empty() || may_pass(&cause) {
            return cause;
        }
        let release = |&server: &usize| self.restore_on(server, name, RestoreMode::Release);
        let released = join_all(holding.iter().map(release)).await;
        let (mut undone, mut left) = (Vec::new(), Vec::new());
        for (server, released) in holding.into_iter().zip(released) {
            let address = self.peers[server].address.clone();
            match released {
                Ok(_) => undone.push(address),
                Err(error) => left.push((address, error)),
            }
        }
        NotRestored { job: self.job().clone(), undone, left, cause }.into()
    }
}

/// Whether a server that failed so may still do it, or be doing it.
fn may_pass(error: &Error) -> bool {
    match error {
        Error::Call(failed) => matches!(failed.fault.kind, FaultKind::Deadline | FaultKind::Unavailable),
        _ => false,
    }
}
