//! Bounds a rank's waits for other ranks. During the wait the log names the awaited rank, and at the deadline the error
//! names it. Every blocking call and background task of a session waits here.
//!
//! A live rank may be silent for minutes: evaluations, compilers and checkpoints take as long. A dead rank should be
//! named soon.

use std::{
    collections::BTreeMap,
    future::Future,
    pin::pin,
    sync::{Mutex, atomic::Ordering::Relaxed},
    time::Duration,
};

use longshore_proto::{DECISION_AWAITED, Fault, FaultKind, Rank, STATE_AWAITED, ServerId, Step, Version};
use longshore_wire::v1::DescribeResponse;

use super::{
    Backoff, ByServer, Cluster,
    call::recovers,
    waits::{Impatience, LONG},
};
use crate::{
    error::{Error, Result, TimedOut},
    host::{self, Instant},
    lock,
};

/// A rank whose process watches no server for this long is gone. A live process opens a broken watch again within two
/// seconds.
const BACK: Duration = Duration::from_secs(15);

impl Cluster {
    /// Awaits work of other ranks for the session's deadline, and up to `slow_deadline` while every rank's process is
    /// there.
    pub(crate) async fn patiently<T>(&self, future: impl Future<Output = T>) -> Result<T, Impatience> {
        self.patiently_for(|_| true, future).await
    }

    /// Awaits as `patiently` does, but only the processes of ranks for which `needed` holds must be there.
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

    /// Returns true if every server answers and every rank's process watches one of them.
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
        // This process has not joined yet, so no process is newer.
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
    let ranks = || answers.values().flatten().flat_map(|answer| &answer.ranks);
    // Where shards have replicas, a rank may watch another server than the first.
    let watches = |rank: u32| ranks().any(|of| of.rank == rank && of.watches);
    answers.values().all(Result::is_ok)
        && ranks().filter(|rank| needed(Rank(rank.rank))).all(|rank| watches(rank.rank))
}

fn is_recovering(answer: &Result<DescribeResponse>) -> bool {
    matches!(answer, Err(Error::Call(failed)) if recovers(&failed.fault))
}

/// The time from one report to the next.
const AGAIN: Duration = Duration::from_secs(30);

impl Cluster {
    /// Awaits `future`, which ends by itself as a wait of `patiently` does. Meanwhile the log says whom the job waits
    /// for. `what` names the awaited thing.
    pub(crate) async fn watched<T>(&self, what: &str, future: impl Future<Output = T>) -> T {
        self.watched_for(self.options.deadline, what, future).await
    }

    /// Awaits as `watched` does, for work on all of the state, which may take all of `slow_deadline`.
    pub(crate) async fn watched_at_work<T>(&self, what: &str, future: impl Future<Output = T>) -> T {
        self.watched_for(self.options.slow_deadline, what, future).await
    }

    async fn watched_for<T>(&self, bound: Duration, what: &str, future: impl Future<Output = T>) -> T {
        let start = Instant::now();
        let vigil = async {
            host::sleep(LONG).await;
            loop {
                self.say_who_is_waited_for(what, start, bound).await;
                host::sleep(AGAIN).await;
            }
        };
        tokio::select! {
            biased;
            value = future => value,
            () = vigil => unreachable!("a vigil has no end"),
        }
    }

    async fn say_who_is_waited_for(&self, what: &str, start: Instant, bound: Duration) {
        // A pause needs no report here, since it was reported when it began.
        if self.waits.is_paused() || !self.waits.is_turn_to_tell() {
            return;
        }
        let answers = self.on_each(|server| self.glance(server)).await;
        let is_silent = answers.values().any(|answer| answer.is_err() && !is_recovering(answer));
        let reasons = answers.into_iter().filter_map(|(server, answer)| Some((server, waits(answer)?)));
        let said: Vec<String> =
            reasons.map(|(server, reason)| format!("server {} {reason}", self.address(server))).collect();
        let reason = if said.is_empty() { "no server misses anything".to_string() } else { said.join("; ") };
        // Past the deadline a wait goes on only while every rank's process is there, for `slow_deadline` at most.
        let most = match start.elapsed() <= bound {
            true => bound,
            false if is_silent => bound + bound.min(BACK),
            false => self.options.slow_deadline,
        };
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
        // The job is not open on the server yet, or the server has lost the job. Rank 0 handles both.
        Err(Error::StateLost(_)) => Some("does not hold the job".to_string()),
        Err(Error::Call(failed)) if recovers(&failed.fault) => Some("recovers the job".to_string()),
        Err(Error::Call(failed)) => Some(format!("does not answer ({})", failed.fault.value)),
        Err(error) => Some(format!("cannot go on ({error})")),
    }
}

impl Cluster {
    /// Returns `TimedOut` with its cause: a dead server, or the rank and shard that the step's decision lacks.
    pub(crate) async fn late(&self, what: &'static str, version: Version, waited: Duration) -> Error {
        let answers = self.on_each(|server| self.glance(server)).await;
        let reason = |(server, answer)| Some((server, self.troubles.of(server).or_else(|| reason(answer))?));
        let reasons = answers.into_iter().filter_map(reason);
        // Causes come before effects: a dead server, state that cannot be fetched, a missing gradient, a missing
        // decision.
        let worst = reasons.max_by_key(|(_, fault)| {
            let waits = |what: &str| fault.value.contains(what);
            (fault.kind == FaultKind::Unavailable, waits(STATE_AWAITED), !waits(DECISION_AWAITED))
        });
        TimedOut {
            what,
            server: worst.as_ref().map(|(server, _)| self.address(*server).to_string()),
            job: self.job().clone(),
            step: Some(Step(version.0)),
            shard: None,
            version: Some(version),
            waited,
            last: worst.map(|(_, fault)| fault),
        }
        .into()
    }
}

/// Returns why a server does not go on; None while the server itself has work to do.
fn reason(answer: Result<DescribeResponse>) -> Option<Fault> {
    match answer {
        Ok(answer) if answer.waiting_for.is_empty() => None,
        Ok(answer) => {
            let value = format!("waiting for {}", answer.waiting_for);
            Some(Fault::new(FaultKind::Deadline, "the job", value, "moving", "see that worker's log"))
        }
        Err(Error::Call(failed)) => Some(failed.fault),
        Err(_) => None,
    }
}

/// Servers that do not take gradients, and why.
#[derive(Default)]
pub(crate) struct Troubles(Mutex<BTreeMap<ServerId, Fault>>);

impl Troubles {
    /// Notes that a server does not take gradients, for example because it drains or is gone. Returns true if the
    /// server is unavailable, and this was not noted since it last took gradients.
    pub(crate) fn note(&self, server: ServerId, fault: &Fault) -> bool {
        let mut troubles = lock(&self.0);
        let first = !troubles.contains_key(&server) && fault.kind == FaultKind::Unavailable;
        if first {
            troubles.insert(server, fault.clone());
        }
        first
    }

    /// Notes that the server takes gradients again.
    pub(crate) fn clear(&self, server: ServerId) {
        lock(&self.0).remove(&server);
    }

    /// Returns why a server does not take gradients.
    pub(crate) fn of(&self, server: ServerId) -> Option<Fault> {
        lock(&self.0).get(&server).cloned()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    };

    use super::*;
    use crate::cluster::{
        fake_for_tests::{Answer, DEADLINE, cluster, says},
        waits::Waits,
    };

    #[test]
    fn a_wait_outlasts_the_deadline_while_a_server_recovers_the_job() {
        let has_connected = Arc::new(AtomicBool::new(false));
        let recovers_now = Arc::clone(&has_connected);
        let (cluster, _runtime) = cluster(vec![says(move |_| match recovers_now.load(Relaxed) {
            true => Answer::recovering(),
            false => Answer::fault(FaultKind::NotFound, "job"),
        })]);
        has_connected.store(true, Relaxed);
        let comes = async { host::sleep(Duration::from_secs(5)).await };
        let waited = async { Ok(cluster.patiently(comes).await) };
        match cluster.runtime.block_on(waited).unwrap() {
            Ok(()) => {}
            Err(Impatience::Failed(error)) => panic!("{error}"),
            Err(Impatience::Elapsed(waited)) => panic!("it gave up after {waited:?}"),
        }
        // A glance does not wait for the recovery.
        let begun = Instant::now();
        let glance = cluster.runtime.block_on(cluster.glance(ServerId(0)));
        assert!(matches!(&glance, Err(Error::Call(failed)) if recovers(&failed.fault)), "{glance:?}");
        assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    }

    /// An operator's pause may be longer than any wait of the job itself.
    #[test]
    fn a_pause_is_no_part_of_the_longest_wait() {
        let (mut cluster, _runtime) = cluster(vec![says(|_| Answer::described(1))]);
        cluster.options.slow_deadline = Duration::from_secs(2);
        let start = Instant::now();
        cluster.waits.paused("an operator looks");
        std::thread::sleep(cluster.options.slow_deadline + DEADLINE);
        cluster.waits.resumed();
        let is_worth_it = async { Ok(cluster.is_worth_waiting(start, &|_| true).await) };
        assert!(cluster.runtime.block_on(is_worth_it).unwrap());
        // Without a pause, a wait of the same length is over.
        let before = start - cluster.options.slow_deadline;
        cluster.waits = Waits::new(&cluster.options);
        let is_worth_it = async { Ok(cluster.is_worth_waiting(before, &|_| true).await) };
        assert!(!cluster.runtime.block_on(is_worth_it).unwrap());
    }
}
