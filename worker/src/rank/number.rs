//! The incarnations of this process. The first one says when the process began, by the clock of the job's first server.
//! A later process so has a greater number, however long either of them was stopped.
//!
//! A process that joins again takes its next number. A successor's number is greater, so the successor stays, and this
//! process ends with `Fenced`. Random low bits tell two processes apart that began in one millisecond.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    hash::{BuildHasher, RandomState},
    process,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Instant, SystemTime, UNIX_EPOCH},
};

use longshore_proto::{Incarnation, JobName, Rank};

use crate::{cluster::Cluster, error::Result};

/// Bits below the milliseconds: a random number, whose highest bit stays free for joins again.
const LOW_BITS: u32 = 22;
const MOST_MS: u64 = u64::MAX >> LOW_BITS;

/// A rank of a job, as one process takes it. A fork is another process.
type Place = (u32, Vec<String>, JobName, Rank);

/// The next number of each place that this process has begun to take.
static NEXT: Mutex<BTreeMap<Place, u64>> = Mutex::new(BTreeMap::new());

fn next() -> MutexGuard<'static, BTreeMap<Place, u64>> {
    NEXT.lock().unwrap_or_else(PoisonError::into_inner)
}

fn place(cluster: &Cluster) -> Place {
    let options = &cluster.options;
    (process::id(), options.servers.clone(), cluster.job().clone(), options.rank)
}

/// Chooses the first number of a process that began at `start`, unless an earlier session has.
pub(crate) async fn begin(cluster: &Cluster, start: Instant) -> Result<()> {
    let place = place(cluster);
    if next().contains_key(&place) {
        return Ok(());
    }
    let answers = cluster.on_each(|server| cluster.glance(server)).await;
    let ranks = answers.values().flatten().flat_map(|answer| &answer.ranks);
    let seen = ranks.filter(|rank| rank.rank == cluster.options.rank.0).map(|rank| rank.incarnation).max();
    let here = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |now| now.as_millis() as u64);
    let now = cluster.clock().await.unwrap_or_else(here);
    let began = now.saturating_sub(start.elapsed().as_millis() as u64);
    let random = RandomState::new().hash_one((place.0, SystemTime::now()));
    next().entry(place).or_insert(first(began, now, seen.unwrap_or(0), random));
    Ok(())
}

/// Takes the next number of this process. Each is given once.
pub(crate) async fn take(cluster: &Cluster) -> Result<Incarnation> {
    let place = place(cluster);
    loop {
        if let Entry::Occupied(mut next) = next().entry(place.clone()) {
            let number = *next.get();
            *next.get_mut() = number.saturating_add(1);
            return Ok(Incarnation(number));
        }
        begin(cluster, Instant::now()).await?;
    }
}

/// The process has given its place up: a later session of it begins as another process would.
pub(crate) fn forget(cluster: &Cluster) {
    next().remove(&place(cluster));
}

/// Returns the first number of a process that began at `began`, in ms since 1970. Numbers later than `now` show that
/// the clock went back, and are exceeded.
fn first(began: u64, now: u64, seen: u64, random: u64) -> u64 {
    let newest = seen >> LOW_BITS;
    let began = if newest > now { newest + 1 } else { began };
    (began.min(MOST_MS) << LOW_BITS) | random >> (u64::BITS - LOW_BITS + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: u64 = 1_800_000_000_000;

    #[test]
    fn the_later_process_has_the_greater_number_whatever_it_saw() {
        let old = first(NOW - 10, NOW, 0, u64::MAX);
        let new = first(NOW, NOW, old, 0);
        assert!(new > old + 1000, "{new} and {old}");
        // The old process looks only after its successor has joined.
        let woken = first(NOW - 10, NOW + 5000, new, u64::MAX);
        assert!(woken < new, "{woken} and {new}");
        // Numbers of earlier releases are microseconds.
        assert!(old > NOW * 1000);
    }

    #[test]
    fn a_clock_that_went_back_makes_no_process_older_than_its_predecessor() {
        let old = first(NOW, NOW, 0, u64::MAX);
        assert!(first(NOW - 3_600_000, NOW - 3_600_000, old, 0) > old);
        assert_eq!(first(NOW, NOW, u64::MAX, 0) >> LOW_BITS, MOST_MS);
    }

    #[test]
    fn two_processes_of_one_millisecond_differ() {
        let random = |number| first(NOW, NOW, 0, RandomState::new().hash_one(number));
        assert_ne!(random(0), random(1));
    }
}
