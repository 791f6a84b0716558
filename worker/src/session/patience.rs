//! Deadlines that do not run while the job is paused: then everybody waits for an operator, not for a defect.

use std::{
    future::Future,
    time::{Duration, Instant},
};

use tokio::sync::watch;

use super::Core;
use crate::error::{Error, StillPaused};

/// Whether the job is paused, as Watch tells.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pause {
    /// Since when, and the reason.
    pub(crate) now: Option<(Instant, String)>,
    /// When the last pause ended.
    pub(crate) ended: Option<Instant>,
    /// Pauses that have ended.
    pub(crate) count: u64,
}

/// How a patient wait ended without a result.
pub(crate) enum Impatience {
    /// The deadline passed; how long it was.
    Elapsed(Duration),
    /// The session failed meanwhile, or was paused too long.
    Failed(Error),
}

impl Core {
    /// Awaits `future` for `deadline`, or longer while the job is paused. Ends at once when the session fails.
    pub(crate) async fn patiently<T>(
        &self,
        deadline: Duration,
        future: impl Future<Output = T>,
    ) -> Result<T, Impatience> {
        let start = Instant::now();
        let mut failure = self.failure.subscribe();
        let mut pause = self.pause.subscribe();
        tokio::pin!(future);
        loop {
            let end = self.end_of_patience(start, deadline, &pause.borrow());
            tokio::select! {
                biased;
                value = &mut future => return Ok(value),
                error = failed(&mut failure) => return Err(Impatience::Failed(error)),
                Ok(()) = pause.changed() => {}
                () = tokio::time::sleep_until(end.into()) => return Err(self.impatience(start, &pause.borrow())),
            }
        }
    }

    fn end_of_patience(&self, start: Instant, deadline: Duration, pause: &Pause) -> Instant {
        match (&pause.now, pause.ended) {
            (Some((since, _)), _) => *since + self.options.pause_deadline,
            (None, Some(ended)) => start.max(ended) + deadline,
            (None, None) => start + deadline,
        }
    }

    fn impatience(&self, start: Instant, pause: &Pause) -> Impatience {
        match &pause.now {
            Some((since, reason)) => Impatience::Failed(
                StillPaused { job: self.job().clone(), reason: reason.clone(), waited: since.elapsed() }
                    .into(),
            ),
            None => Impatience::Elapsed(start.elapsed()),
        }
    }

    /// Whether a wait that began at `start` is over.
    pub(crate) fn out_of_patience(&self, start: Instant, deadline: Duration) -> bool {
        self.end_of_patience(start, deadline, &self.pause.borrow()) <= Instant::now()
    }

    pub(crate) fn paused(&self, reason: &str) {
        self.pause.send_if_modified(|pause| {
            let new = pause.now.is_none();
            if new {
                tracing::warn!(job = %self.job(), reason, "the job is paused");
                pause.now = Some((Instant::now(), reason.to_string()));
            }
            new
        });
    }

    pub(crate) fn resumed(&self) {
        self.pause.send_if_modified(|pause| {
            let ended = pause.now.take().is_some();
            if ended {
                tracing::info!(job = %self.job(), "the job goes on");
                pause.ended = Some(Instant::now());
                pause.count += 1;
            }
            ended
        });
    }
}

/// The session's failure, once there is one.
async fn failed(failure: &mut watch::Receiver<Option<Error>>) -> Error {
    match failure.wait_for(Option::is_some).await.map(|error| error.clone()) {
        Ok(Some(error)) => error,
        // The sender lives in the core that is awaited from.
        _ => std::future::pending().await,
    }
}
