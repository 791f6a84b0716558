//! Waits that outlast a deadline for a reason: a server that recovers the job is alive, however long that takes, and so is a
//! job that an operator has paused.

use std::time::{Duration, Instant};

use longshore_proto::{FaultKind, ServerId};

use super::{
    call,
    fake_for_tests::{Answer, DEADLINE, Says, cluster, says},
    *,
};
use crate::error::Error;

/// A server that says for some time that it recovers the job, and then that a version is not there.
fn recovering(lasts: Duration) -> Vec<Says> {
    let since = Instant::now();
    vec![says(move |_| match since.elapsed() < lasts {
        true => Answer::recovering(),
        false => Answer::fault(FaultKind::NotFound, "version"),
    })]
}

#[test]
fn a_call_is_made_again_until_the_job_is_recovered() {
    let (cluster, _runtime) = cluster(recovering(DEADLINE * 6));
    let asked = cluster.runtime.block_on(cluster.describe(ServerId(0), false, DEADLINE));
    let Err(Error::Call(failed)) = asked else { panic!("{asked:?}") };
    assert_eq!(failed.fault.kind, FaultKind::NotFound, "{failed}");
}

#[test]
fn a_wait_outlasts_the_deadline_while_a_server_recovers_the_job() {
    let (cluster, _runtime) = cluster(recovering(Duration::from_secs(60)));
    let comes = async { tokio::time::sleep(Duration::from_secs(5)).await };
    let waited = async { Ok(cluster.patiently(comes).await) };
    match cluster.runtime.block_on(waited).unwrap() {
        Ok(()) => {}
        Err(Impatience::Failed(error)) => panic!("{error}"),
        Err(Impatience::Elapsed(waited)) => panic!("it gave up after {waited:?}"),
    }
    // Nobody who waits for something else stays with it.
    let begun = Instant::now();
    let glance = cluster.runtime.block_on(cluster.glance(ServerId(0)));
    assert!(matches!(&glance, Err(Error::Call(failed)) if call::recovers(&failed.fault)), "{glance:?}");
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
}

/// An operator may take longer than anything that the job does by itself.
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
    // With no pause behind it, a wait as long as that is over.
    let before = start.checked_sub(cluster.options.slow_deadline).unwrap();
    cluster.waits = Waits::new(&cluster.options);
    let is_worth_it = async { Ok(cluster.is_worth_waiting(before, &|_| true).await) };
    assert!(!cluster.runtime.block_on(is_worth_it).unwrap());
}
