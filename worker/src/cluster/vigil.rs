//! Logs which ranks or servers a waiting rank waits for, before its deadline names them in an error.

use std::{
    future::Future,
    time::{Duration, Instant},
};

use longshore_wire::v1::DescribeResponse;

use super::{Cluster, call::recovers, waits::LONG};
use crate::error::{Error, Result};

/// The time from one report to the next.
const AGAIN: Duration = Duration::from_secs(30);

impl Cluster {
    /// Awaits `future`, which has the session's deadline, or `slow_deadline` while every process is there.
    /// Meanwhile the log says whom the job waits for. `what` names the awaited thing.
    pub(crate) async fn watched<T>(&self, what: &str, future: impl Future<Output = T>) -> T {
        self.watched_for(self.options.deadline, what, future).await
    }

    /// Same as `watched`, for work on all of the state: the future has all of `slow_deadline`.
    pub(crate) async fn watched_at_work<T>(&self, what: &str, future: impl Future<Output = T>) -> T {
        self.watched_for(self.options.slow_deadline, what, future).await
    }

    async fn watched_for<T>(&self, bound: Duration, what: &str, future: impl Future<Output = T>) -> T {
        let start = Instant::now();
        let vigil = async {
            tokio::time::sleep(LONG).await;
            loop {
                self.say_who_is_waited_for(what, start, bound).await;
                tokio::time::sleep(AGAIN).await;
            }
        };
        tokio::select! {
            biased;
            value = future => value,
            () = vigil => unreachable!("a vigil has no end"),
        }
    }

    async fn say_who_is_waited_for(&self, what: &str, start: Instant, bound: Duration) {
        // A pause was reported when it began.
        if self.waits.is_paused() || !self.waits.is_turn_to_tell() {
            return;
        }
        let answers = self.on_each(|server| self.glance(server)).await;
        let reasons = answers.into_iter().filter_map(|(server, answer)| Some((server, waits(answer)?)));
        let said: Vec<String> =
            reasons.map(|(server, reason)| format!("server {} {reason}", self.address(server))).collect();
        let reason = if said.is_empty() { "no server misses anything".to_string() } else { said.join("; ") };
        // Past the deadline the wait goes on only while every process is there.
        let most = if start.elapsed() <= bound { bound } else { self.options.slow_deadline };
        tracing::warn!(
            job = %self.job(),
            rank = self.options.rank.0,
            "still waiting for {what}, for {:.0} s of at most {:.0} s: {reason}",
            start.elapsed().as_secs_f64(),
            most.as_secs_f64()
        );
    }
}

/// Returns why a server does not go on; None if it waits for nothing.
fn waits(answer: Result<DescribeResponse>) -> Option<String> {
    match answer {
        Ok(answer) if answer.waiting_for.is_empty() => None,
        Ok(answer) => Some(format!("waits for {}", answer.waiting_for)),
        // Either the job is not open there yet, or the server has lost it. Rank 0 handles both.
        Err(Error::StateLost(_)) => Some("does not hold the job".to_string()),
        Err(Error::Call(failed)) if recovers(&failed.fault) => Some("recovers the job".to_string()),
        Err(Error::Call(failed)) => Some(format!("does not answer ({})", failed.fault.value)),
        Err(error) => Some(format!("cannot go on ({error})")),
    }
}
