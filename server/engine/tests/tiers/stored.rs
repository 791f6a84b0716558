//! Images and gradients beside the state, on tiers that store them.

use std::{ops::Range, path::Path, sync::mpsc};

use longshore_engine::{
    ids::{Contributor, GradientSlot, OwnedShard},
    io::Direction,
    memory::{Region, Slab},
    tier::{GradientId, GradientStore, Kind, Recovered, Transfer},
};
use longshore_proto::Version;

use super::{
    each_that,
    fixture::{AGES, IMAGE_BLOCK, TierCase, check_all, image},
};

/// Returns a shard's whole image of a version.
fn whole(case: &TierCase, owned: OwnedShard, version: u64) -> Vec<u8> {
    image(owned, version).repeat(case.blocks(owned))
}

fn kept(case: &TierCase) -> bool {
    let store = case.open().store;
    store.images.is_some() && store.behind.is_some()
}

#[test]
fn both_images_of_a_recovered_version_are_there() {
    each_that(kept, |case| {
        let store = case.started();
        (1..=3).for_each(|version| case.step(&store, version));
        drop(store);
        let (store, recovered) = case.recover(None);
        assert!(matches!(recovered, Recovered::Version(_)));
        for owned in case.shards() {
            for (age, behind) in AGES {
                let mut found = vec![0; case.blocks(owned) * IMAGE_BLOCK];
                assert!(store.images.as_ref().unwrap().load(owned, age, &mut found).unwrap());
                assert!(found == whole(case, owned, 3 - behind), "{owned:?}, {age:?}");
            }
        }
    });
}

#[test]
fn images_that_were_loaded_are_kept_and_those_of_a_failed_load_are_not() {
    each_that(kept, |case| {
        let store = case.open().store;
        let images = store.images.as_ref().unwrap();
        case.load(&store);
        // First a failed load that brought both images, then a load that brings the current images alone.
        for owned in case.shards() {
            for (age, behind) in AGES {
                images.store(owned, age, &whole(case, owned, 7 - behind)).unwrap();
            }
        }
        images.forget();
        for owned in case.shards() {
            images.store(owned, AGES[0].0, &whole(case, owned, 5)).unwrap();
        }
        case.start(&store, case.record(5));
        drop(store);
        let (store, _) = case.recover(None);
        let images = store.images.as_ref().unwrap();
        for owned in case.shards() {
            let mut found = vec![0; case.blocks(owned) * IMAGE_BLOCK];
            assert!(images.load(owned, AGES[0].0, &mut found).unwrap());
            assert!(found == whole(case, owned, 5));
            assert!(!images.load(owned, AGES[1].0, &mut found).unwrap(), "an image of a load that failed");
        }
        check_all(case, &store, 0);
    });
}

#[test]
fn parts_of_spilled_images_are_read_by_version() {
    each_that(TierCase::spills, |case| {
        let store = case.started();
        (1..=3).for_each(|version| case.step(&store, version));
        let images = store.images.as_ref().unwrap();
        let read = |owned, version, within: Range<usize>| {
            let mut found = Vec::new();
            let mut take = |bytes: &[u8]| found.extend_from_slice(bytes);
            images.read(owned, Version(version), within, &mut take).unwrap().then_some(found)
        };
        for owned in case.shards() {
            let length = case.blocks(owned) * IMAGE_BLOCK;
            for within in [0..length, 6..length - 2, 100..104] {
                for version in [2, 3] {
                    let found = read(owned, version, within.clone());
                    assert!(found.is_some_and(|found| found == whole(case, owned, version)[within.clone()]));
                }
                assert_eq!(read(owned, 1, within), None, "two versions are kept");
            }
        }
    });
}

fn buffer(bytes: &[u8]) -> Region {
    let size = bytes.len().next_multiple_of(4096);
    let mut region = Slab::allocate(Slab::bytes_for([size])).unwrap().carve_here(&[size]).remove(0);
    region.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
    region
}

fn write_part(store: &dyn GradientStore, place: GradientId, within: Range<usize>, bytes: &[u8]) {
    let (sender, done) = mpsc::channel();
    let moved = move |_, result| sender.send(result).unwrap();
    store.start(Direction::Write, place, within, buffer(bytes), Box::new(moved));
    done.recv().unwrap().unwrap();
}

#[test]
fn gradients_come_back_from_their_places_and_leave_no_name() {
    each_that(
        |case| case.open().store.gradients.is_some(),
        |case| {
            let store = case.started();
            let gradients = store.gradients.as_deref().unwrap();
            let places: Vec<GradientId> = case
                .shards()
                .flat_map(|owned| {
                    GradientSlot::all(case.spec.gradient_slots()).map(move |slot| (owned, slot))
                })
                .map(|(owned, slot)| GradientId { owned, slot, kind: Kind::Contribution(Contributor::LONE) })
                .collect();
            let bytes = |place: &GradientId| {
                let length = case.blocks(place.owned) * IMAGE_BLOCK;
                (0..length)
                    .map(|index| (index / 512 + place.owned.index() * 5 + place.slot.index()) as u8)
                    .collect::<Vec<u8>>()
            };
            for place in &places {
                let bytes = bytes(place);
                let half = bytes.len() / 2;
                write_part(gradients, *place, half..bytes.len(), &bytes[half..]);
                write_part(gradients, *place, 0..half, &bytes[..half]);
            }
            for place in &places {
                let bytes = bytes(place);
                let read = Transfer::start(
                    gradients,
                    Direction::Read,
                    *place,
                    bytes.len(),
                    buffer(&vec![0; bytes.len()]),
                );
                assert!(read.wait().unwrap().bytes()[..bytes.len()] == bytes, "{place:?}");
                assert!(gradients.describe(*place).contains("gradient"));
            }
            let written: usize = places.iter().map(|place| bytes(place).len()).sum();
            assert_eq!(gradients.written_bytes(), written as u64);
            let named = |path: &Path| path.file_name().is_some_and(|name| name == "gradients");
            assert!(!case.files().iter().any(|path| named(path)), "a killed process would leave it");
        },
    );
}
