//! A part that is written while training goes on still holds exactly one version.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use longshore_proto::Param;

use super::*;

const SAVED: usize = 6;

/// Trains until `SAVED` checkpoints are written. Returns their names, and the version at which training ended.
fn save_while_training(live: &Trained, store: &Store) -> (Vec<String>, Version) {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let training = scope.spawn(|| {
            (1..).take_while(|_| !stop.load(Ordering::Relaxed)).for_each(|step| live.step(step));
        });
        let save = |index| {
            let name = format!("d{}-{index}", live.jobs[0].spec().max_delay);
            let before = live.version();
            live.save(store, &name);
            while live.version() == before && !training.is_finished() {
                thread::sleep(Duration::from_millis(1));
            }
            name
        };
        let names = (0..SAVED).map(save).collect();
        stop.store(true, Ordering::Relaxed);
        training.join().unwrap();
        (names, live.version())
    })
}

#[test]
fn a_part_is_of_exactly_one_version() {
    let (_root, store) = store();
    for max_delay in [0, 1] {
        let spec = spec(1, max_delay);
        let live = Trained::after(&spec, 1, 0);
        let (names, end) = save_while_training(&live, &store);

        let reference = Trained::after(&spec, 1, 0);
        let seen = |reference: &Trained, version| (reference.state_hash(), reference.image(version).unwrap());
        let mut versions = vec![seen(&reference, Version(0))];
        for step in 1..=end.0 {
            reference.step(step);
            versions.push(seen(&reference, Version(step)));
        }
        assert_eq!(live.state_hash(), reference.state_hash(), "training is undisturbed");

        for name in names {
            let restored = Trained::open(&spec, 2);
            let info = restored.restore(&store, &name).unwrap().remove(0);
            let version = info.version.0 as usize;
            assert_eq!(info.state_hash.as_ref(), Some(&versions[version].0), "{name}");
            assert_eq!(restored.state_hash(), versions[version].0, "{name}");
            let oldest = version - version.min(max_delay as usize);
            for (kept, (_, image)) in versions.iter().enumerate().take(version + 1).skip(oldest) {
                assert!(restored.image(Version(kept as u64)).unwrap() == *image, "{name}, image of {kept}");
            }
        }
    }
}

#[test]
fn a_part_says_how_far_it_is_while_it_is_written() {
    let (_root, store) = store();
    // 8 Mi elements, whose part takes long enough to be seen.
    let params = vec![Param { name: "a".into(), shape: vec![8 << 20], group: 0 }];
    let live = Trained::after(&JobSpec { params, groups: vec!["decay".into()], ..spec(16, 0) }, 1, 0);
    let job = &live.jobs[0];
    let seen = thread::scope(|scope| {
        let writing = scope.spawn(|| live.save(&store, "followed"));
        let mut seen = Vec::new();
        while !writing.is_finished() {
            seen.extend(job.snapshots.checkpoint_progress());
            thread::yield_now();
        }
        writing.join().unwrap();
        seen
    });
    let bytes = 12 << 23;
    assert!(seen.iter().all(|&(written, all)| written <= all && all >= bytes && all < bytes * 11 / 10));
    assert!(seen.iter().any(|&(written, all)| written > 0 && written < all), "{:?}", seen.last());
    assert_eq!(job.snapshots.checkpoint_progress(), None);
}
