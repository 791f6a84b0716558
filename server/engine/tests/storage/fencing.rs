//! Joins outlive the server. A replaced process stays fenced after a restart and a step back, whatever a crash does to
//! the writes.

use longshore_engine::tier::Storage;
use longshore_proto::{Fault, FaultKind, Incarnation, Rank, Version};

use super::{
    Dirs, check,
    common::{cluster::Cluster, lasting_tiers},
    disk::{Disks, Failure, Image, each_crash},
    open, references, run_steps, small, started, step_of,
};

/// Returns the rank's incarnation, and the version at which it joined.
fn joined(cluster: &Cluster) -> (u64, u64) {
    let rank = &cluster.jobs[0].protocol.ranks()[0];
    (rank.incarnation.map_or(0, |incarnation| incarnation.0), rank.joined_at.0)
}

fn is_fenced(cluster: &Cluster, old: u64) {
    let job = &cluster.jobs[0];
    let next = job.progress().version.0 + 1;
    let fault = job.join(Rank(0), Incarnation(old), None).unwrap_err();
    assert_eq!((fault.kind, fault.field.as_str()), (FaultKind::Fenced, "incarnation"), "{fault}");
    let fault = job.commit(Incarnation(old), step_of(&cluster.spec, next).1).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Fenced, "{fault}");
}

#[test]
fn a_replaced_process_stays_fenced_after_a_restart() {
    for tier in lasting_tiers() {
        let spec = longshore_proto::JobSpec { tier, ..small(0) };
        let dirs = Dirs::new(2);
        let mut cluster = started(&spec, &dirs.storage);
        run_steps(&mut cluster, 1..=2);
        cluster.join(0);
        run_steps(&mut cluster, 3..=3);
        drop(cluster);
        let mut cluster = open(&spec, &dirs.storage).unwrap();
        assert_eq!(joined(&cluster), (2, 2), "{tier:?}");
        is_fenced(&cluster, 1);
        // The second process takes part as before, and may repeat its join.
        run_steps(&mut cluster, 4..=4);
        assert_eq!(cluster.jobs[0].join(Rank(0), Incarnation(2), None), Ok(true));
        assert_eq!(check(&cluster, &references(&spec, 4)), 4);
        // A third process fences the second one for good, even before the third joins.
        cluster.jobs[0].protocol.fence(Rank(0), Incarnation(3)).unwrap();
        cluster.jobs[0].protocol.keep_joined().unwrap();
        drop(cluster);
        let cluster = open(&spec, &dirs.storage).unwrap();
        assert_eq!(joined(&cluster), (3, 4), "{tier:?}");
        is_fenced(&cluster, 2);
        assert_eq!(cluster.jobs[0].join(Rank(0), Incarnation(3), None), Ok(true));
        cluster.jobs[0].protocol.keep_joined().unwrap();
        if !spec.properties().durable_later {
            continue;
        }
        drop(cluster);
        let back = Storage { at_most: Some(Version(3)), ..dirs.storage.clone() };
        let cluster = open(&spec, &back).unwrap();
        assert_eq!((check(&cluster, &references(&spec, 3)), joined(&cluster)), (3, (3, 4)));
        is_fenced(&cluster, 1);
    }
}

/// The caller names the decision to take back, and the server takes back no other.
#[test]
fn a_step_back_fences_and_a_refused_one_changes_nothing() {
    let (spec, dirs) = (small(0), Dirs::new(1));
    let mut cluster = started(&spec, &dirs.storage);
    run_steps(&mut cluster, 1..=2);
    let ended = Fault::new(FaultKind::Unavailable, "job", "stepping back", "open", "wait");
    let back = |incarnation, version, decided_by| {
        let [incarnation, decided_by] = [incarnation, decided_by].map(Incarnation);
        cluster.jobs[0].protocol.end_for_step_back(incarnation, Version(version), decided_by, &ended)
    };
    let by = cluster.jobs[0].progress().last_commit.unwrap().decided_by.0;
    for (refused, kind) in [
        (back(0, 1, by), FaultKind::Fenced),
        (back(9, 0, by), FaultKind::Precondition),
        (back(9, 1, by + 1), FaultKind::Conflict),
    ] {
        assert_eq!(refused.unwrap_err().kind, kind);
    }
    assert_eq!(joined(&cluster), (1, 0));
    assert_eq!(back(9, 2, by), Ok(true));
    is_fenced(&cluster, 1);
    assert_eq!(back(9, 1, by), Ok(false));
    // No decision may come between the comparison and the job's end on this server.
    let decided = cluster.jobs[0].commit(Incarnation(9), step_of(&spec, 3).1);
    assert_eq!(decided.unwrap_err(), ended);
}

#[test]
fn a_crash_anywhere_forgets_no_join_that_was_answered() {
    let spec = small(0);
    let disks = Disks::default();
    let dirs = Dirs::on(&disks, 2);
    let mut cluster = started(&spec, &dirs.storage);
    let mut answered = vec![(disks.events().len(), joined(&cluster))];
    for step in 1..=3 {
        run_steps(&mut cluster, step..=step);
        cluster.join(0);
        answered.push((disks.events().len(), joined(&cluster)));
        assert_eq!(joined(&cluster), (step + 1, step));
    }
    drop(cluster);
    let events = disks.events();
    let promise = |count: usize| answered.iter().rposition(|(before, _)| *before <= count).unwrap();
    let checked = |count: usize, failure: Failure, promised: usize, image: Image| {
        let allowed = [promised, (promised + 1).min(3)].map(|index| answered[index].1);
        let found = joined(&open(&spec, &dirs.with(image)).unwrap());
        assert!(allowed.contains(&found), "{failure:?} at {count}: {found:?}, not of {allowed:?}");
    };
    each_crash((&Image::new(), &events), answered[0].0..=events.len(), 1, promise, checked);
}

#[test]
fn a_damaged_table_of_ranks_is_read_from_its_copy_or_named() {
    let spec = small(0);
    let disks = Disks::default();
    let dirs = Dirs::on(&disks, 1);
    let mut cluster = started(&spec, &dirs.storage);
    cluster.join(0);
    run_steps(&mut cluster, 1..=1);
    drop(cluster);
    // The file has two tables, each in two copies of a sector. The copies of the newer table come first.
    let flip = |copy: u64| disks.flip("ranks", copy * 4096 + 70, 3);
    flip(0);
    assert_eq!(joined(&open(&spec, &dirs.storage).unwrap()), (2, 0));
    (1..4).for_each(flip);
    let fault = open(&spec, &dirs.storage).err().unwrap();
    assert_eq!(fault.kind, FaultKind::Corrupt);
    for word in ["server-0-of-1/ranks", "stop every worker"] {
        assert!(fault.to_string().contains(word), "no {word:?} in: {fault}");
    }
}
