//! The end of a store: deletion, or a permanent failure.

use std::{
    fs, thread,
    time::{Duration, Instant},
};

use longshore_proto::FaultKind;

use super::{
    each, each_that,
    fixture::{Keeps, check_all, update},
};

#[test]
fn a_job_that_is_deleted_leaves_nothing() {
    each(|case| {
        let store = case.started();
        case.step(&store, 1);
        if let Some(durable) = &store.durable {
            assert!(!case.is_empty());
            durable.discard().unwrap();
        }
        drop(store);
        assert!(case.is_empty(), "{:?}", case.files());
        let store = case.started();
        check_all(case, &store, 0);
    });
}

#[test]
fn the_first_failure_stays() {
    each_that(
        |case| case.open().store.behind.is_some(),
        |case| {
            let store = case.started();
            case.step(&store, 1);
            store.durable.as_ref().unwrap().discard().unwrap();
            let failure = store.behind.as_ref().unwrap().failure().unwrap();
            for owned in case.shards() {
                let read = store.state.read(owned, &mut |_| panic!("a failed store gave its state"));
                assert_eq!(read.unwrap_err().to_string(), failure.to_string());
                assert!(store.state.load(owned, &mut |_| panic!("a failed store took state")).is_err());
            }
            assert_eq!(store.behind.as_ref().unwrap().failure().unwrap().to_string(), failure.to_string());
        },
    );
}

#[test]
fn files_that_vanish_end_the_job_before_anyone_is_told_of_a_version() {
    each_that(
        |case| case.keeps != Keeps::Nothing,
        |case| {
            let store = case.started();
            case.step(&store, 1);
            case.files().iter().for_each(|file| fs::remove_file(file).unwrap());
            let record = case.record(2);
            let decided = store.durable.as_ref().unwrap().decide(&record);
            let Some(behind) = &store.behind else {
                let fault = decided.unwrap_err();
                assert_eq!(fault.kind, FaultKind::Internal, "{fault}");
                return;
            };
            decided.unwrap();
            case.shards().for_each(|owned| update(&store, owned, 2));
            behind.finish(&record).unwrap();
            let end = Instant::now() + Duration::from_secs(60);
            while behind.failure().is_none() {
                assert!(Instant::now() < end, "nobody noticed");
                thread::sleep(Duration::from_millis(1));
            }
            assert_eq!(behind.durable(), case.record(1).version);
        },
    );
}
