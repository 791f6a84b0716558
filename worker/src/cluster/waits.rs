//! Ends a session's waits: with the awaited value, with a background failure, or at a deadline. Deadlines do not
//! run while the job is paused, since every rank then waits for an operator.

use std::{future::Future, sync::Mutex, time::Duration};

use longshore_proto::JobName;
use tokio::sync::watch;

use super::Options;
use crate::{
    error::{Error, Result, StillPaused},
    host::{self, Instant},
    lock,
};

/// A rank logs a wait of this length. Healthy steps take less time.
pub(super) const LONG: Duration = Duration::from_secs(5);

/// The two causes that end any wait: a failure of the session, or a pause that lasts too long.
pub(crate) struct Waits {
    job: JobName,
    /// The longest wait for an operator.
    pause_deadline: Duration,
    /// The first background failure. Every later call returns it.
    failure: watch::Sender<Option<Error>>,
    pause: watch::Sender<Pause>,
    /// Time of the last report of a wait. Several threads may wait for the same thing, and one report is enough.
    told: Mutex<Option<Instant>>,
}

/// The job's pause, as far as this rank has heard.
#[derive(Clone, Debug, Default)]
struct Pause {
    /// Begin and reason of the current pause.
    now: Option<(Instant, String)>,
    /// End of the last pause.
    ended: Option<Instant>,
    /// Number of pauses that ended.
    count: u64,
}

/// A patient wait's end without a result.
pub(crate) enum Impatience {
    /// The deadline passed, after this long.
    Elapsed(Duration),
    /// The session failed meanwhile, or the pause lasted too long.
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

    /// Keeps the first failure, and wakes all waits.
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

    /// Returns the background failure as an error, if there is one.
    pub(crate) fn check(&self) -> Result<()> {
        self.failure.borrow().clone().map_or(Ok(()), Err)
    }

    /// Awaits `future` for `deadline`, or longer while the job is paused. A failure of the session ends the wait
    /// at once.
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
                () = host::sleep_until(end) => return Err(self.impatience(start, &pause.borrow())),
            }
        }
    }

    /// Awaits `future`, which has a deadline of its own. A failure of the session ends the wait at once.
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

    /// Returns true if a wait that began at `start` is past its deadline.
    pub(crate) fn out_of_patience(&self, start: Instant, deadline: Duration) -> bool {
        self.end_of_patience(start, deadline, &self.pause.borrow()) <= Instant::now()
    }

    /// Returns true if a long wait may be logged now, `LONG` after the last report, and notes the time.
    pub(super) fn is_turn_to_tell(&self) -> bool {
        let mut told = lock(&self.told);
        let turn = told.is_none_or(|told| told.elapsed() >= LONG);
        if turn {
            *told = Some(Instant::now());
        }
        turn
    }

    pub(crate) fn is_paused(&self) -> bool {
        self.pause.borrow().now.is_some()
    }

    /// Number of pauses that ended.
    pub(crate) fn pauses(&self) -> u64 {
        self.pause.borrow().count
    }

    /// Notes that the job is paused. A pause that was not known yet begins now.
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

    /// Notes that the job is no longer paused.
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

/// Awaits the session's failure.
async fn failed(failure: &mut watch::Receiver<Option<Error>>) -> Error {
    match failure.wait_for(Option::is_some).await.map(|error| error.clone()) {
        Ok(Some(error)) => error,
        // Unreachable: the sender lives as long as `Waits`, which this wait borrows.
        _ => std::future::pending().await,
    }
}
