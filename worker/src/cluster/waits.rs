//! How a session's waits end: with what they wait for, with a failure found in the background, or at a deadline. A
//! deadline does not run while the job is paused, since then everybody waits for an operator.

use std::{
    future::Future,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use longshore_proto::JobName;
use tokio::sync::watch;

use super::Options;
use crate::error::{Error, Result, StillPaused};

/// A rank that waits this long says so. A healthy step takes less time.
pub(super) const LONG: Duration = Duration::from_secs(5);

/// What ends a wait other than the thing it waits for: a failure of the session, or a pause that lasts too long.
pub(crate) struct Waits {
    job: JobName,
    /// The longest wait for an operator.
    pause_deadline: Duration,
    /// The first failure found in the background. Every later call returns it.
    failure: watch::Sender<Option<Error>>,
    pause: watch::Sender<Pause>,
    /// When the rank last said that it waits. Several threads may wait for the same thing, and one report is enough.
    told: Mutex<Option<Instant>>,
}

/// Whether the job is paused, as far as this rank has heard.
#[derive(Clone, Debug, Default)]
struct Pause {
    /// When the pause began, and its reason.
    now: Option<(Instant, String)>,
    /// When the last pause ended.
    ended: Option<Instant>,
    /// How many pauses have ended.
    count: u64,
}

/// How a patient wait ended without a result.
pub(crate) enum Impatience {
    /// The deadline passed, after this long.
    Elapsed(Duration),
    /// The session failed meanwhile, or was paused too long.
    Failed(Error),
}

impl Waits {
    pub(super) fn new(options: &Options) -> Waits {
        Waits {
            job: options.spec.name.clone(),
            pause_deadline: options.pause_deadline,
            failure: watch::Sender::new(None),
            pause: watch::Sender::new(Pause::default()),
            told: Mutex::default(),
        }
    }

    /// Keeps the first failure, and wakes everybody who waits.
    pub(crate) fn fail(&self, error: Error) {
        self.failure.send_if_modified(|failure| {
            let first = failure.is_none();
            if first {
                tracing::debug!(job = %self.job, %error, "the session failed");
                *failure = Some(error);
            }
            first
        });
    }

    /// The failure found in the background, if any.
    pub(crate) fn check(&self) -> Result<()> {
        self.failure.borrow().clone().map_or(Ok(()), Err)
    }

    /// Awaits `future` for `deadline`, or longer while the job is paused. It ends at once when the session fails.
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

    /// Awaits `future`, which has a deadline of its own. It ends at once when the session fails.
    pub(crate) async fn unless_failed<T>(&self, future: impl Future<Output = Result<T>>) -> Result<T> {
        let mut failure = self.failure.subscribe();
        tokio::select! {
            biased;
            value = future => value,
            error = failed(&mut failure) => Err(error),
        }
    }

    fn end_of_patience(&self, start: Instant, deadline: Duration, pause: &Pause) -> Instant {
        match (&pause.now, pause.ended) {
            (Some((since, _)), _) => *since + self.pause_deadline,
            (None, Some(ended)) => start.max(ended) + deadline,
            (None, None) => start + deadline,
        }
    }

    fn impatience(&self, start: Instant, pause: &Pause) -> Impatience {
        match &pause.now {
            Some((since, reason)) => Impatience::Failed(
                StillPaused { job: self.job.clone(), reason: reason.clone(), waited: since.elapsed() }.into(),
            ),
            None => Impatience::Elapsed(start.elapsed()),
        }
    }

    /// Whether a wait that began at `start` is over.
    pub(crate) fn out_of_patience(&self, start: Instant, deadline: Duration) -> bool {
        self.end_of_patience(start, deadline, &self.pause.borrow()) <= Instant::now()
    }

    /// Returns whether a long wait may be reported now, because the last report was a while ago, and notes the time.
    pub(super) fn is_turn_to_tell(&self) -> bool {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        let turn = told.is_none_or(|told| told.elapsed() >= LONG);
        if turn {
            *told = Some(Instant::now());
        }
        turn
    }

    pub(crate) fn is_paused(&self) -> bool {
        self.pause.borrow().now.is_some()
    }

    /// How many pauses have ended.
    pub(crate) fn pauses(&self) -> u64 {
        self.pause.borrow().count
    }

    /// Notes that the job is paused. If it was not paused before, the pause begins now.
    pub(crate) fn paused(&self, reason: &str) {
        self.pause.send_if_modified(|pause| {
            let new = pause.now.is_none();
            if new {
                tracing::warn!(job = %self.job, reason, "the job is paused");
                pause.now = Some((Instant::now(), reason.to_string()));
            }
            new
        });
    }

    /// Notes that the job goes on, if it was paused.
    pub(crate) fn resumed(&self) {
        self.pause.send_if_modified(|pause| {
            let ended = pause.now.take().is_some();
            if ended {
                tracing::info!(job = %self.job, "the job goes on");
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
        // The sender lives as long as `Waits`, which this wait borrows, so this does not happen.
        _ => std::future::pending().await,
    }
}
