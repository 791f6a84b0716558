//! Power failures after every write and every flush of a run. Unflushed writes are lost, reordered or torn.

use std::sync::Arc;

use longshore_engine::tier::{Spill, Storage};

use super::{
    Dirs, check,
    disk::{Disks, Event, Failure, Image, crash, each_crash},
    references, reopen, run_steps, small, started,
};

/// A recorded run. `durable` has, from version 0, the number of disk events at which each version became durable.
struct Recorded {
    dirs: Dirs,
    events: Vec<Event>,
    durable: Vec<usize>,
}

const STEPS: u64 = 4;

fn record(max_delay: u32, directories: usize, spill: Spill) -> Recorded {
    let spec = small(max_delay);
    let disks = Disks::default();
    let mut dirs = Dirs::on(&disks, directories);
    dirs.storage.spill = spill;
    let mut cluster = started(&spec, &dirs.storage);
    let mut durable = vec![disks.events().len()];
    for step in 1..=STEPS {
        run_steps(&mut cluster, step..=step);
        durable.push(disks.events().len());
    }
    Recorded { dirs, events: disks.events(), durable }
}

#[test]
fn a_crash_anywhere_goes_back_to_a_durable_version() {
    let cases = [(0, 1, Spill::State), (1, 2, Spill::State), (0, 2, Spill::All), (1, 1, Spill::All)];
    for (max_delay, directories, spill) in cases {
        let spec = small(max_delay);
        let recorded = record(max_delay, directories, spill);
        let references = references(&spec, STEPS);
        let mut newer = 0;
        let Recorded { dirs, events, durable } = &recorded;
        let promise = |count: usize| durable.iter().filter(|&&events| events <= count).count() as u64 - 1;
        let checked = |count: usize, failure: Failure, promised: u64, image: Image| {
            let mut cluster = reopen(&spec, &dirs.with(image))
                .unwrap_or_else(|fault| panic!("{failure:?} at {count}: {fault}"));
            let version = check(&cluster, &references);
            assert!(
                version == promised || version == promised + 1,
                "{failure:?} at {count}: version {version}, and {promised} was durable"
            );
            newer += u64::from(version > promised);
            // A second power failure right after the recovery changes nothing, and training continues.
            if matches!(failure, Failure::Torn) && version < STEPS {
                cluster.join(0);
                run_steps(&mut cluster, version + 1..=version + 1);
                assert_eq!(check(&cluster, &references), version + 1);
            }
        };
        each_crash((&Image::new(), events), durable[0]..=events.len(), 1, promise, checked);
        // A record may reach the disk just before its flush, and then the newer version counts. Some cases must show
        // that.
        assert!(newer > 0);
    }
}

/// A recovery writes the record again. A crash during that write must lose nothing.
#[test]
fn a_crash_during_recovery_loses_nothing() {
    let spec = small(1);
    let recorded = record(1, 2, Spill::State);
    let references = references(&spec, STEPS);
    let image = crash(&Image::new(), &recorded.events, recorded.events.len(), Failure::Lost, 1);
    let disks = Disks::with(image.clone());
    let storage = Storage { disks: Some(Arc::new(disks.clone())), ..recorded.dirs.storage.clone() };
    assert_eq!(check(&reopen(&spec, &storage).unwrap(), &references), STEPS);
    let events = disks.events();
    assert!(events.len() >= 8, "two copies and two flushes on each of two disks");
    let checked = |count: usize, failure: Failure, (), image: Image| {
        let cluster = reopen(&spec, &recorded.dirs.with(image)).unwrap();
        assert_eq!(check(&cluster, &references), STEPS, "{failure:?} at {count}");
    };
    each_crash((&image, &events), 0..=events.len(), 4, |_| (), checked);
}

#[test]
fn a_crash_before_the_first_version_starts_over() {
    let spec = small(0);
    let recorded = record(0, 1, Spill::All);
    let references = references(&spec, 1);
    let lost = |count| crash(&Image::new(), &recorded.events, count, Failure::Lost, 1);
    let mut images: Vec<Image> = (0..recorded.durable[0]).map(lost).collect();
    images.dedup();
    for image in images {
        let mut cluster = started(&spec, &recorded.dirs.with(image));
        run_steps(&mut cluster, 1..=1);
        assert_eq!(check(&cluster, &references), 1);
    }
}

#[test]
fn a_server_ahead_of_its_peers_steps_back() {
    for (max_delay, spill) in [(0, Spill::State), (1, Spill::State), (0, Spill::All), (1, Spill::All)] {
        let spec = small(max_delay);
        let recorded = record(max_delay, 2, spill);
        let references = references(&spec, STEPS);
        let image = crash(&Image::new(), &recorded.events, recorded.events.len(), Failure::Lost, 1);
        let at_most = Some(longshore_proto::Version(STEPS - 1));
        let storage = Storage { at_most, ..recorded.dirs.with(image) };
        assert_eq!(check(&reopen(&spec, &storage).unwrap(), &references), STEPS - 1);
        // A version that a recovery gave up stays gone, even if a later recovery would take any version.
        let storage = Storage { at_most: None, ..storage };
        let mut cluster = reopen(&spec, &storage).unwrap();
        assert_eq!(check(&cluster, &references), STEPS - 1);
        cluster.join(0);
        run_steps(&mut cluster, STEPS..=STEPS);
        assert_eq!(check(&cluster, &references), STEPS);
        drop(cluster);
        let storage = Storage { at_most: Some(longshore_proto::Version(1)), ..storage };
        let fault = reopen(&spec, &storage).err().unwrap();
        assert_eq!(fault.field, "version", "{fault}");
    }
}
