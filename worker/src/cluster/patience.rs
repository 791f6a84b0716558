//! How long a rank waits for what the others bring. A rank that evaluates, compiles its model or writes a checkpoint says
//! nothing for minutes, and is still there; one that died is to be named soon.

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

/// Somebody is gone who is not there for so long: watches that broke are opened again within a second or two.
const BACK: Duration = Duration::from_secs(15);

impl Cluster {
    /// Awaits what other ranks bring, for the session's deadline, and on for `slow_deadline` while nobody is gone.
    pub(crate) async fn patiently<T>(&self, future: impl Future<Output = T>) -> Result<T, Impatience> {
        self.patiently_for(|_| true, future).await
    }

    /// Does the same for what servers and the ranks that are `needed` bring.
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

    /// Whether a wait that began at `start` may outlast the session's deadline.
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

    /// Whether every server answers, and the process of every rank watches the first one.
    pub(crate) async fn everybody_is_there(&self) -> bool {
        is_everybody(&self.on_each(|server| self.glance(server)).await, &|_| true)
    }

    /// Whether what is waited for may still come: everybody is there, or a server recovers the job. Meanwhile that one cannot
    /// say who is there, and a new rank 0 that has it step back does not watch yet. Where a newer process has taken this rank
    /// the session fails.
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

    /// Gives `Fenced` when a newer process has taken this rank.
    pub(crate) fn check_newest(&self, server: ServerId, answer: &DescribeResponse) -> Result<()> {
        let mine = answer.ranks.iter().find(|known| known.rank == self.options.rank.0);
        let (newest, ours) = (mine.map_or(0, |rank| rank.incarnation), self.incarnation.load(Relaxed));
        // Before it has joined, this process is the newer one.
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
