//! The state that the next process finds: versions, joins, pauses, and interrupted steps.

use longshore_engine::{
    record::{Joined, Standing},
    tier::{Recovered, Store},
};
use longshore_proto::{FaultKind, Incarnation, Lifetime, Rank, Step, Version};

use super::{
    each, each_that,
    fixture::{FIRST, TierCase, check, check_all, update},
};

fn survives(case: &TierCase) -> bool {
    case.lifetime() > Lifetime::Process
}

/// Returns the record from which a process continues.
fn record_of(recovered: &Recovered) -> &longshore_engine::record::Record {
    match recovered {
        Recovered::Nothing => panic!("nothing was kept"),
        Recovered::Version(record) => record,
        Recovered::Interrupted(interrupted) => interrupted.records.last().unwrap(),
    }
}

#[test]
fn a_job_goes_on_from_its_last_version_or_from_nothing() {
    each(|case| {
        let store = case.started();
        (1..=3).for_each(|version| case.step(&store, version));
        drop(store);
        let (store, recovered) = case.recover(None);
        if case.lifetime() == Lifetime::Process {
            assert!(matches!(recovered, Recovered::Nothing));
            return;
        }
        assert_eq!(*record_of(&recovered), case.record(3));
        check_all(case, &store, 3);
        case.step(&store, 4);
        check_all(case, &store, 4);
    });
}

#[test]
fn a_job_that_was_never_loaded_to_the_end_is_nothing() {
    each(|case| {
        let store = case.open().store;
        case.load(&store);
        drop(store);
        let (store, recovered) = case.recover(None);
        assert!(matches!(recovered, Recovered::Nothing));
        case.load(&store);
        case.start(&store, case.record(0));
        check_all(case, &store, 0);
    });
}

#[test]
fn a_step_that_was_cut_off_is_done_to_the_end_or_not_at_all() {
    each_that(survives, |case| {
        let store = case.started();
        case.step(&store, 1);
        case.decide(&store, &case.record(2));
        update(&store, FIRST, 2);
        drop(store);
        let (store, recovered) = case.recover(None);
        match (&recovered, case.lifetime()) {
            (Recovered::Version(record), Lifetime::Drive) => {
                assert_eq!(*record, case.record(1));
                check_all(case, &store, 1);
            }
            (Recovered::Interrupted(interrupted), Lifetime::Host) => {
                assert_eq!(interrupted.records, [case.record(1), case.record(2)]);
                let versions: Vec<_> = interrupted.shards.iter().map(|shard| shard.version).collect();
                assert_eq!(versions[0], Version(2));
                assert!(versions[1..].iter().all(|version| *version == Version(1)), "{versions:?}");
                check(&store, FIRST, 2);
                case.shards().skip(1).for_each(|owned| check(&store, owned, 1));
                case.shards().skip(1).for_each(|owned| update(&store, owned, 2));
                check_all(case, &store, 2);
            }
            (_, lifetime) => panic!("not what {lifetime:?} leaves"),
        }
    });
}

#[test]
fn the_version_before_can_be_taken_up_again_where_it_is_kept() {
    let keeps = |case: &TierCase| case.open().store.behind.is_some();
    each_that(keeps, |case| {
        let store = case.started();
        (1..=3).for_each(|version| case.step(&store, version));
        drop(store);
        let (store, recovered) = case.recover(Some(Version(2)));
        assert_eq!(*record_of(&recovered), case.record(2));
        check_all(case, &store, 2);
        drop(store);
        // Adopting the older version gave up the newer one.
        let (store, recovered) = case.recover(None);
        assert_eq!(*record_of(&recovered), case.record(2));
        case.step(&store, 3);
        check_all(case, &store, 3);
    });
}

#[test]
fn who_has_joined_stays_known() {
    each_that(survives, |case| {
        let store = case.started();
        let durable = store.durable.as_ref().unwrap();
        let joined = |incarnation, at, fence_only| Joined {
            incarnation: Incarnation(incarnation),
            at: Version(at),
            fence_only,
        };
        for joined in [joined(5, 0, false), joined(9, 0, true)] {
            durable.joined(Rank(0), joined, false);
            durable.keep_joined().unwrap();
        }
        assert_eq!(durable.who_joined(), [Some(joined(9, 0, true))]);
        case.step(&store, 1);
        drop(store);
        let (store, _) = case.recover(None);
        assert_eq!(store.durable.unwrap().who_joined(), [Some(joined(9, 0, true))]);
    });
}

#[test]
fn a_pause_and_its_end_stay_known() {
    each_that(survives, |case| {
        let store = case.started();
        case.step(&store, 1);
        let stand = |store: &Store, standing: Standing| {
            let mut record = case.record(1);
            record.standing = Some(standing);
            store.durable.as_ref().unwrap().stand(&record).unwrap();
            record
        };
        let paused = Standing { paused: Some("look at the data".into()), loss_scale: None };
        let record = stand(&store, paused);
        drop(store);
        let (store, recovered) = case.recover(None);
        assert_eq!(*record_of(&recovered), record);
        let record = stand(&store, Standing { paused: None, loss_scale: Some(0.5) });
        drop(store);
        let (store, recovered) = case.recover(None);
        assert_eq!(*record_of(&recovered), record);
        // The next version has no standing.
        case.step(&store, 2);
        drop(store);
        assert_eq!(*record_of(&case.recover(None).1), case.record(2));
    });
}

#[test]
fn sums_that_were_formed_stay_formed_where_memory_is_kept() {
    each_that(
        |case| case.open().store.kept.is_some(),
        |case| {
            let store = case.started();
            case.step(&store, 1);
            store.kept.as_ref().unwrap().complete(FIRST.next(), Step(2));
            drop(store);
            let (store, recovered) = case.recover(None);
            let Recovered::Interrupted(interrupted) = recovered else { panic!("memory was kept") };
            assert!(interrupted.shards[1].summed.contains(&Step(2)));
            assert!(!interrupted.shards[0].summed.contains(&Step(2)));
            // A lone rank joins and sends the step again.
            let joined = Joined { incarnation: Incarnation(1), at: Version(1), fence_only: false };
            store.durable.as_ref().unwrap().joined(Rank(0), joined, true);
            drop(store);
            let Recovered::Interrupted(interrupted) = case.recover(None).1 else { panic!("memory was kept") };
            assert!(!interrupted.shards[1].summed.contains(&Step(2)));
        },
    );
}

#[test]
fn two_processes_never_have_one_store() {
    each_that(survives, |case| {
        let store = case.started();
        let fault = case.try_open(None).err().unwrap();
        assert_eq!(fault.kind, FaultKind::Conflict, "{fault}");
        assert!(fault.value.contains("in use"), "{fault}");
        case.step(&store, 1);
        check_all(case, &store, 1);
    });
}

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
