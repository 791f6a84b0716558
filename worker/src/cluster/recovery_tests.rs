//! Waits that may outlast a deadline: a server that recovers the job is alive for as long as that takes, and an
//! operator may pause the job.

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use longshore_proto::{FaultKind, ServerId};

use super::{
    call,
    fake_for_tests::{Answer, DEADLINE, cluster, says},
    *,
};
use crate::{
    error::Error,
    host::{self, Instant},
};

/// A connected server that recovers the job for the time `lasts`, and then misses a version.
fn recovering(lasts: Duration) -> (Cluster, tokio::runtime::Runtime) {
    let began = Arc::new(OnceLock::<Instant>::new());
    let since = Arc::clone(&began);
    let connected = cluster(vec![says(move |_| match since.get().map(|since| since.elapsed()) {
        None => Answer::fault(FaultKind::NotFound, "job"),
        Some(time) if time < lasts => Answer::recovering(),
        Some(_) => Answer::fault(FaultKind::NotFound, "version"),
    })]);
    began.set(Instant::now()).expect("the only start");
    connected
}

#[test]
fn a_call_is_made_again_until_the_job_is_recovered() {
    let (cluster, _runtime) = recovering(DEADLINE * 6);
    let asked = cluster.runtime.block_on(cluster.describe(ServerId(0), false, DEADLINE));
    let Err(Error::Call(failed)) = asked else { panic!("{asked:?}") };
    assert_eq!(failed.fault.kind, FaultKind::NotFound, "{failed}");
}

#[test]
fn a_wait_outlasts_the_deadline_while_a_server_recovers_the_job() {
    let (cluster, _runtime) = recovering(Duration::from_secs(60));
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
    assert!(matches!(&glance, Err(Error::Call(failed)) if call::recovers(&failed.fault)), "{glance:?}");
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
