//! State on every tier: loads, reads and updates.

use longshore_engine::tier::{StateMut, StateRef};
use longshore_proto::Version;

use super::{
    each, each_that,
    fixture::{FIRST, bump, byte, check, check_all, update},
};

#[test]
fn what_is_loaded_is_read_in_any_order() {
    each(|case| {
        let store = case.open().store;
        case.load(&store);
        case.shards().rev().for_each(|owned| check(&store, owned, 0));
        case.start(&store, case.record(0));
        check_all(case, &store, 0);
    });
}

#[test]
fn a_shard_may_be_loaded_in_several_calls() {
    each(|case| {
        let store = case.open().store;
        // The shards' calls alternate, so a shard may have been written out to make room for another.
        for part in 0..2 {
            for owned in case.shards() {
                let load = &mut |state: StateMut<'_>| {
                    for (array, bytes) in state.arrays.into_iter().enumerate() {
                        let half = bytes.len() / 2;
                        let range = if part == 0 { 0..half } else { half..bytes.len() };
                        range.for_each(|index| bytes[index] = byte(owned, array, index, 0));
                    }
                };
                store.state.load(owned, load).unwrap();
            }
        }
        case.start(&store, case.record(0));
        check_all(case, &store, 0);
    });
}

#[test]
fn each_update_is_done_once_and_read_back() {
    each(|case| {
        let store = case.started();
        for version in 1..=4 {
            case.step(&store, version);
            check_all(case, &store, version);
        }
    });
}

#[test]
fn a_shard_that_is_updated_leaves_the_others() {
    each(|case| {
        let store = case.started();
        case.decide(&store, &case.record(1));
        update(&store, FIRST, 1);
        check(&store, FIRST, 1);
        case.shards().skip(1).for_each(|owned| check(&store, owned, 0));
    });
}

#[test]
fn a_skipped_step_leaves_the_state() {
    each(|case| {
        let store = case.started();
        case.step(&store, 1);
        let mut record = case.record(2);
        record.applied = 1;
        record.commit.as_mut().unwrap().skip = true;
        case.decide(&store, &record);
        for owned in case.shards() {
            let mut carried = 0;
            if let Some(kept) = &store.kept {
                kept.carry(owned, Version(2), &mut || carried += 1);
                assert_eq!(carried, 1);
            }
        }
        case.finish(&store, &record);
        check_all(case, &store, 1);
        case.step(&store, 3);
        check_all(case, &store, 2);
    });
}

#[test]
fn several_shards_are_updated_together_as_they_are_one_by_one() {
    each_that(
        |case| case.open().store.together.is_some(),
        |case| {
            let store = case.started();
            let together = store.together.as_ref().unwrap();
            let mut shards = 0;
            let update = &mut |states: Vec<StateMut<'_>>| {
                shards += states.len();
                states.into_iter().for_each(|mut state| bump(&mut state));
            };
            let others: Vec<_> = case.shards().skip(1).collect();
            together.update_run(&others, update).unwrap();
            assert_eq!(shards, others.len());
            check(&store, FIRST, 0);
            case.shards().skip(1).for_each(|owned| check(&store, owned, 1));
        },
    );
}

#[test]
fn a_shard_has_all_its_blocks_in_every_array() {
    each(|case| {
        let store = case.started();
        for owned in case.shards() {
            let look = &mut |state: StateRef<'_>| assert_eq!(state.blocks(), case.blocks(owned));
            store.state.read(owned, look).unwrap();
        }
    });
}
