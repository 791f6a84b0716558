//! Bounds a rank's wait for other ranks. A live rank may say nothing for minutes: it evaluates, compiles its model
//! or writes a checkpoint. A dead rank should be named soon.

use std::{
    future::Future,
    pin::pin,
    sync::atomic::Ordering::Relaxed,
    time::{Duration, Instant},
};

use longshore_proto::{Fault, FaultKind, Rank, ServerId};
use longshore_wire::v1::DescribeResponse;

use super::{Backoff, ByServer, Cluster, call::recovers, waits::Impatience};
use crate::error::{Error, Result};

/// A rank without a watch for this long is gone: broken watches are opened again within a second or two.
const BACK: Duration = Duration::from_secs(15);

impl Cluster {
    /// Awaits work of other ranks for the session's deadline, and up to `slow_deadline` while every process is
    /// there.
    pub(crate) async fn patiently<T>(&self, future: impl Future<Output = T>) -> Result<T, Impatience> {
        self.patiently_for(|_| true, future).await
    }

    /// Same as `patiently`, but only ranks for which `needed` holds must be there.
    pub(crate) async fn patiently_for<T>(
        &self,
        needed: impl Fn(Rank) -> bool,
        future: impl Future<Output = T>,
    ) -> Result<T, Impatience> {
        let mut future = pin!(future);
        let start = Instant::now();
        loop {
            match self.waits.patiently(self.options.deadline, future.as_mut()).await {
                Err(Impatience::Elapsed(_)) => {}
                ended => return ended,
            }
            let goes_on = tokio::select! {
                biased;
                value = future.as_mut() => return Ok(value),
                goes_on = self.is_worth_waiting(start, &needed) => goes_on,
            };
            if !goes_on {
                let elapsed = Impatience::Elapsed(start.elapsed());
                return Err(self.waits.check().map_or_else(Impatience::Failed, |()| elapsed));
            }
        }
    }

    /// Returns true if a wait that began at `start` may outlast the session's deadline.
    pub(crate) async fn is_worth_waiting(&self, start: Instant, needed: &impl Fn(Rank) -> bool) -> bool {
        let end = Instant::now() + self.options.deadline.min(BACK);
        let mut backoff = Backoff::new();
        while !self.waits.out_of_patience(start, self.options.slow_deadline) {
            if self.is_coming(needed).await {
                return true;
            }
            if self.waits.check().is_err() || !backoff.pause(end).await {
                break;
            }
        }
        false
    }

    /// Returns true if every server answers and every rank's process watches server 0.
    pub(crate) async fn everybody_is_there(&self) -> bool {
        is_everybody(&self.on_each(|server| self.glance(server)).await, &|_| true)
    }

    /// Returns true if the awaited event may still come: all processes are there, or a server recovers the job. A
    /// recovering server cannot list the ranks, and a new rank 0 that steps it back does not watch yet. Fails the
    /// session if a newer process has taken this rank.
    async fn is_coming(&self, needed: &impl Fn(Rank) -> bool) -> bool {
        let answers = self.on_each(|server| self.glance(server)).await;
        let newer = |(server, answer): (_, &Result<DescribeResponse>)| {
            self.check_newest(server, answer.as_ref().ok()?).err()
        };
        if let Some(fenced) = answers.iter().find_map(newer) {
            self.waits.fail(fenced);
            return false;
        }
        let recovering = answers.values().any(is_recovering);
        is_everybody(&answers, needed)
            || recovering && answers.values().all(|answer| answer.is_ok() || is_recovering(answer))
    }

    /// Returns `Fenced` if a newer process has taken this rank.
    pub(crate) fn check_newest(&self, server: ServerId, answer: &DescribeResponse) -> Result<()> {
        let mine = answer.ranks.iter().find(|known| known.rank == self.options.rank.0);
        let (newest, ours) = (mine.map_or(0, |rank| rank.incarnation), self.incarnation.load(Relaxed));
        // A process that has not joined yet is the newer one.
        if ours == 0 || newest <= ours {
            return Ok(());
        }
        let remedy = "stop this process";
        let fault =
            Fault::new(FaultKind::Fenced, "incarnation", ours, format!("{newest}, the newest"), remedy);
        Err(self.explain(server, "Describe", None, fault))
    }
}

type Answers = ByServer<Result<DescribeResponse>>;

fn is_everybody(answers: &Answers, needed: &impl Fn(Rank) -> bool) -> bool {
    let first = answers.values().next().and_then(|answer| answer.as_ref().ok());
    let watch = |answer: &DescribeResponse| {
        answer.ranks.iter().filter(|rank| needed(Rank(rank.rank))).all(|rank| rank.watches)
    };
    answers.values().all(Result::is_ok) && first.is_some_and(watch)
}

fn is_recovering(answer: &Result<DescribeResponse>) -> bool {
    matches!(answer, Err(Error::Call(failed)) if recovers(&failed.fault))
}
