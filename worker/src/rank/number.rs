//! Incarnations of this process. The first number says when the process began, by the job's clock. So a later process
//! has a greater number, however long either process was stopped.
//!
//! The job's clock is the clock of its very first server. If that server leaves, the placement keeps the clock's lead
//! over the next server's clock.
//!
//! A process that joins again takes its next number. A successor's number is greater, so the successor stays, and this
//! process ends with `Fenced`. Random low bits tell two processes apart that began in one millisecond.

use std::time::Duration;

use futures_util::future::join;
use longshore_proto::{Fault, FaultKind, Incarnation, ServerId};

use crate::{
    cluster::Cluster,
    error::Result,
    host::{self, Instant},
};

/// Bits below the milliseconds. A random number fills all but the highest of them, which leaves room to add 1 for each
/// later join. The whole number has 56 bits, and 8 bytes on the wire as in earlier releases.
const LOW_BITS: u32 = 15;
const MOST_MS: u64 = u64::MAX >> LOW_BITS;

/// A round trip this short dates the process's begin well enough. After `TRIES` longer round trips the shortest of them
/// counts.
const SHORT: Duration = Duration::from_millis(20);
const TRIES: usize = 4;

/// When a process began, in ms since 1970.
struct Begin {
    began: u64,
    /// The time of the measurement.
    now: u64,
    /// The error of `began`: half a round trip, and parts of milliseconds.
    error: u64,
}

impl Begin {
    /// Asks a server, and measures by its clock. After a long round trip the server is asked again, since this process
    /// may have been stopped meanwhile.
    async fn measure(cluster: &Cluster, server: ServerId, start: Instant) -> Option<Begin> {
        let mut best: Option<(Duration, Begin)> = None;
        for _ in 0..TRIES {
            let sent = Instant::now();
            let Some(now) = cluster.clock(server).await else { continue };
            let trip = sent.elapsed();
            if best.as_ref().is_none_or(|&(least, _)| trip < least) {
                // The best guess: the server read its clock in the middle of the trip.
                let age = sent.duration_since(start) + trip / 2;
                let began = now.saturating_sub(millis(age));
                best = Some((trip, Begin { began, now, error: millis(trip / 2) + 2 }));
            }
            if trip < SHORT {
                break;
            }
        }
        best.map(|(_, measured)| measured)
    }

    /// Converts to the job's clock, which is `ms` ahead of the measured clock.
    fn ahead(self, ms: i64) -> Begin {
        let ahead = |time: u64| time.saturating_add_signed(ms);
        Begin { began: ahead(self.began), now: ahead(self.now), error: self.error }
    }

    /// Measures by this host's clock.
    fn here(start: Instant) -> Begin {
        let now = millis(host::unix());
        Begin { began: now.saturating_sub(millis(start.elapsed())), now, error: 2 }
    }

    /// Returns the first number of the process. `seen` is the rank's newest number when the process began. The result
    /// exceeds `seen`, unless that number's process began later. A newest number later than now shows that the clock
    /// went back, so it is exceeded too.
    fn number(&self, seen: u64, random: u64) -> u64 {
        let Begin { began, now, error } = *self;
        let newest = seen >> LOW_BITS;
        let is_earlier = newest <= began.saturating_add(error) || newest > now;
        let began = if is_earlier { began.max(newest.saturating_add(1)) } else { began };
        (began.min(MOST_MS) << LOW_BITS) | random >> (u64::BITS - LOW_BITS + 1)
    }
}

fn millis(time: Duration) -> u64 {
    time.as_millis() as u64
}

/// Chooses the first number of a process that began at `start`, unless an earlier session has chosen it.
pub(crate) async fn begin(cluster: &Cluster, start: Instant) -> Result<()> {
    if cluster.options.process.has_begun() {
        return Ok(());
    }
    let answers = cluster.on_each(|server| cluster.glance(server)).await;
    let ranks = answers.values().flatten().flat_map(|answer| &answer.ranks);
    let seen = ranks.filter(|rank| rank.rank == cluster.options.rank.0).map(|rank| rank.incarnation).max();
    let random = host::random();
    // The first server may be lost or stopped. The next server's clock is then taken, since servers' clocks agree
    // better than ranks' clocks.
    let mut measured = None;
    for server in cluster.servers() {
        measured = Begin::measure(cluster, server, start).await;
        if measured.is_some() {
            break;
        }
    }
    let begin = measured.unwrap_or_else(|| Begin::here(start)).ahead(cluster.placement().clock_ahead_ms);
    cluster.options.process.begin(begin.number(seen.unwrap_or(0), random));
    Ok(())
}

/// Returns the lead of the clock of `server` over the clock of `other`, in ms.
///
/// # Errors
/// `Unavailable` if one of the servers does not tell its clock.
pub(crate) async fn clock_ahead(cluster: &Cluster, server: ServerId, other: ServerId) -> Result<i64> {
    let start = Instant::now();
    let measured = join(Begin::measure(cluster, server, start), Begin::measure(cluster, other, start));
    let (Some(server), Some(other)) = measured.await else {
        let (limit, remedy) = ("said by both servers", "it is tried again");
        return Err(Fault::new(FaultKind::Unavailable, "server.clock", "unknown", limit, remedy).into());
    };
    Ok(server.began as i64 - other.began as i64)
}

/// Takes the next number of this process. Each is given once.
pub(crate) async fn take(cluster: &Cluster) -> Result<Incarnation> {
    begin(cluster, Instant::now()).await?;
    Ok(cluster.options.process.take())
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: u64 = 1_800_000_000_000;

    fn first(began: u64, now: u64, seen: u64, random: u64) -> u64 {
        Begin { began, now, error: 3 }.number(seen, random)
    }

    #[test]
    fn the_later_process_has_the_greater_number_whatever_it_saw() {
        let old = first(NOW - 10, NOW, 0, u64::MAX);
        let new = first(NOW, NOW, old, 0);
        assert!(new > old + 1000, "{new} and {old}");
        // The old process asks for the newest number only after its successor has joined.
        let woken = first(NOW - 10, NOW + 5000, new, u64::MAX);
        assert!(woken < new, "{woken} and {new}");
        // Numbers of earlier releases are microseconds.
        assert!(old > NOW * 1000);
    }

    #[test]
    fn a_predecessor_of_nearly_the_same_time_is_exceeded() {
        let old = first(NOW + 2, NOW + 2, 0, u64::MAX);
        assert!(first(NOW, NOW + 5, old, 0) > old);
    }

    #[test]
    fn a_clock_that_went_back_makes_no_process_older_than_its_predecessor() {
        let old = first(NOW, NOW, 0, u64::MAX);
        assert!(first(NOW - 3_600_000, NOW - 3_600_000, old, 0) > old);
        assert_eq!(first(NOW, NOW, u64::MAX, 0) >> LOW_BITS, MOST_MS);
    }

    #[test]
    fn a_process_that_is_measured_by_another_servers_clock_keeps_its_place() {
        let hour = 3_600_000;
        let successor = first(NOW + 100, NOW + 200, 0, 0);
        let late = Begin { began: NOW + hour, now: NOW + hour + 5000, error: 3 };
        assert!(late.ahead(-(hour as i64)).number(successor, u64::MAX) < successor);
    }

    #[test]
    fn two_processes_of_one_millisecond_differ() {
        let random = |number: u64| first(NOW, NOW, 0, number << 55);
        assert!((1..8).any(|other| random(0) != random(other)));
    }
}
