//! Disks that fail, fill up, vanish, or belong to another job.

use std::{fs, io::ErrorKind, sync::Arc, thread, time::Duration};

use longshore_engine::{
    admission::Need,
    tier::{self, Inputs, Storage, stored_jobs},
};
use longshore_proto::{Fault, FaultKind, Incarnation, Param, Rank, ServerId, ShardId, Step, TierKind};

use super::{Dirs, check, disk::Disks, host, open, references, run_steps, small, started, step_of};

fn refused(storage: &Storage, kind: FaultKind, words: &[&str]) -> Fault {
    let fault = open(&small(0), storage).err().unwrap();
    assert_eq!(fault.kind, kind, "{fault}");
    for word in words {
        assert!(fault.to_string().contains(word), "no {word:?} in: {fault}");
    }
    fault
}

/// Fails the store in step 3. Returns the fault that the job gives from then on.
fn broken(disks: &Disks, dirs: &Dirs, fail: impl Fn(&Disks)) -> Fault {
    let spec = small(1);
    let mut cluster = started(&spec, &dirs.storage);
    run_steps(&mut cluster, 1..=2);
    fail(disks);
    let (flats, commit) = step_of(&spec, 3);
    cluster.push(3, &flats);
    cluster.commit(&commit).unwrap();
    let first = cluster.settle().unwrap_err();
    // From now on no request succeeds, however often it is repeated.
    for _ in 0..2 {
        let job = &cluster.jobs[0];
        let shard = ShardId(0);
        assert_eq!(job.statistics(shard, Step(4)).unwrap_err(), first);
        assert_eq!(job.commit(cluster.incarnations[0], step_of(&spec, 4).1).unwrap_err(), first);
        assert_eq!(job.join(Rank(0), Incarnation(99), None).unwrap_err(), first);
        assert_eq!(job.protocol.durable().0, 2);
    }
    first
}

#[test]
fn a_failed_write_or_flush_is_the_end_of_the_store() {
    let spec = small(1);
    for case in 0..14 {
        let disks = Disks::default();
        let dirs = Dirs::on(&disks, 2);
        let fault = broken(&disks, &dirs, |disks| match case {
            0..5 => disks.fail_write(case + 1, ErrorKind::Other),
            5..10 => disks.fail_write(2 * (case - 5) + 1, ErrorKind::StorageFull),
            _ => disks.fail_flush(case - 9),
        });
        let kind = if (5..10).contains(&case) { FaultKind::Exhausted } else { FaultKind::Internal };
        assert_eq!(fault.kind, kind, "case {case}: {fault}");
        assert!(fault.value.contains("server-0-of-1/data"), "{fault}");
        // A new process continues from the durable version. If only a flush failed, the written record of the newer
        // version may count.
        let cluster = open(&spec, &dirs.storage).unwrap();
        let version = check(&cluster, &references(&spec, 3));
        assert!(version == 2 || (version == 3 && case >= 12), "case {case}: version {version}");
    }
}

/// A write that lands once the folders are free could change a slot that the job's next store has written.
#[test]
fn no_write_lands_after_a_failed_store_has_closed() {
    let (disks, spec) = (Disks::default(), small(0));
    let dirs = Dirs::on(&disks, 2);
    let mut cluster = started(&spec, &dirs.storage);
    run_steps(&mut cluster, 1..=2);
    // The second drive has the second shard. The third shard's write to the first drive fails meanwhile.
    disks.slow_writes(&dirs.storage.dirs[1], Duration::from_millis(300));
    disks.fail_write(2, ErrorKind::Other);
    let (flats, commit) = step_of(&spec, 3);
    cluster.push(3, &flats);
    cluster.commit(&commit).unwrap();
    cluster.settle().unwrap_err();
    drop(cluster);
    let landed = disks.events().len();
    thread::sleep(Duration::from_millis(600));
    assert_eq!(disks.events().len(), landed);
}

#[test]
fn space_is_reserved_before_anything_is_kept() {
    let mut dirs = Dirs::new(2);
    // A tmpfs refuses more bytes than its size. The spec's bytes decide that, before any file is touched.
    dirs.storage.dirs[1] = dirs.of(TierKind::Shm).to_path_buf();
    let mut spec = small(0);
    spec.params.push(Param { name: "huge".into(), shape: vec![3 << 30], group: 0 });
    spec.shard_elements = 1 << 26;
    let placement = super::common::cluster::placement(&spec, 1);
    let layout = spec.validate().unwrap();
    let need = Need::of(&spec, &layout, &placement.owned(ServerId(0)), &dirs.storage);
    assert!(need.disk > layout.elements() * 24 && need.state == 0 && need.buffers > 0);
    let inputs = Inputs {
        spec: &spec,
        layout: &layout,
        owned: &placement.owned(ServerId(0)),
        placement: &placement,
        server: ServerId(0),
        storage: &Storage { buffers: 1, ..dirs.storage.clone() },
    };
    let fault = tier::open(&inputs, 0, host().pool(), Box::new(|| {})).err().unwrap();
    assert_eq!(fault.kind, FaultKind::Exhausted, "{fault}");
    assert!(fault.value.contains("reserve space"), "{fault}");
    for dir in &dirs.storage.dirs {
        assert_eq!(fs::read_dir(dir).unwrap().count(), 0, "left in {}", dir.display());
    }
}

#[test]
fn wrong_directories_are_named_and_left_as_they_are() {
    let spec = small(0);
    let mut dirs = Dirs::new(2);
    let mut cluster = started(&spec, &dirs.storage);
    run_steps(&mut cluster, 1..=3);
    refused(&dirs.storage, FaultKind::Conflict, &["in use by another process", "stop the other server"]);
    drop(cluster);
    let found = stored_jobs(&dirs.storage.dirs);
    assert_eq!(
        (found.jobs.len(), found.jobs[0].spec.clone(), found.jobs[0].server),
        (1, spec.clone(), ServerId(0))
    );

    // A different job has the same name.
    let mut other = spec.clone();
    other.params[0].shape = vec![6];
    let fault = open(&other, &dirs.storage).err().unwrap();
    assert_eq!(fault.kind, FaultKind::Conflict);
    assert!(fault.to_string().contains("spec.params[0]"), "{fault}");

    // The directories are wrong in four ways: one too few, one too many, one not mounted, one swapped for an empty
    // disk.
    let one = Storage { dirs: dirs.storage.dirs[..1].to_vec(), ..dirs.storage.clone() };
    refused(&one, FaultKind::Conflict, &["of another", "directories"].map(|_| "directories"));
    let gone = dirs.storage.dirs[1].join("missing");
    let missing = Storage { dirs: vec![dirs.storage.dirs[0].clone(), gone], ..dirs.storage.clone() };
    refused(&missing, FaultKind::NotFound, &["missing", "mounted"]);
    let empty = tempfile::tempdir().unwrap();
    let swapped =
        Storage { dirs: vec![dirs.storage.dirs[0].clone(), empty.path().into()], ..dirs.storage.clone() };
    refused(&swapped, FaultKind::NotFound, &["mount the disk again"]);
    assert_eq!(fs::read_dir(empty.path()).unwrap().count(), 0);
    let read_only = Storage { dirs: vec!["/sys".into()], ..dirs.storage.clone() };
    refused(&read_only, FaultKind::Precondition, &["/sys", "right to read and write"]);

    // After all these refusals the job is unchanged. The order in which the directories are named does not matter.
    dirs.storage.dirs.reverse();
    let cluster = open(&spec, &dirs.storage).unwrap();
    assert_eq!(check(&cluster, &references(&spec, 3)), 3);
    cluster.jobs[0].discard().unwrap();
    assert!(dirs.storage.dirs.iter().all(|dir| fs::read_dir(dir).unwrap().count() == 0));
}

/// If a step were decided before the version before is durable, a crash could take back a decided step.
#[test]
fn nothing_is_decided_before_the_last_version_is_durable() {
    let spec = small(0);
    let dirs = Dirs::new(1);
    let mut cluster = started(&spec, &dirs.storage);
    let (first, commit) = step_of(&spec, 1);
    cluster.push(1, &first);
    cluster.commit(&commit).unwrap();
    let job = Arc::clone(&cluster.jobs[0]);
    let fault = job.commit(cluster.incarnations[0], step_of(&spec, 2).1).unwrap_err();
    assert_eq!((fault.kind, fault.field.as_str()), (FaultKind::Precondition, "commit.step"));
    assert!(fault.to_string().contains("version 0 is the newest durable"), "{fault}");
    cluster.settle().unwrap();
    run_steps(&mut cluster, 2..=3);
    assert_eq!(cluster.hash(), references(&spec, 3)[3].hash());
}
