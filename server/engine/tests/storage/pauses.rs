//! Pauses and resumes on tiers that outlive the server: once acknowledged, they hold through every crash.

use longshore_engine::{step::Phase, tier::Storage};
use longshore_proto::{Commit, Epoch, JobSpec, Placement, Version};

use super::{
    Dirs,
    common::{cluster::Cluster, lasting_tiers},
    disk::{Disks, Failure, Image, each_crash},
    open, references, small, started, step_of,
};

const REASON: &str = "step 2 overflowed at the smallest loss scale";

/// Returns a job at version 2 that its last decision has paused.
fn paused(spec: &JobSpec, storage: &Storage) -> Cluster {
    let mut cluster = started(spec, storage);
    for step in 1..=2 {
        let (flats, commit) = step_of(spec, step);
        let pause_reason = if step == 2 { REASON.to_string() } else { String::new() };
        cluster.step(&flats, &Commit { pause_reason, ..commit });
    }
    cluster.settle().unwrap();
    cluster
}

fn paused_for(reason: &str) -> Phase {
    Phase::Paused { reason: reason.into() }
}

fn found(cluster: &Cluster) -> (Phase, f64, String) {
    let progress = cluster.jobs[0].progress();
    let commit = progress.last_commit.expect("a decided version");
    (progress.phase, commit.loss_scale, commit.pause_reason)
}

#[test]
fn a_pause_and_its_end_survive_every_power_failure() {
    for directories in [1, 2] {
        let spec = small(0);
        let disks = Disks::default();
        let dirs = Dirs::on(&disks, directories);
        let cluster = paused(&spec, &dirs.storage);
        let before = disks.events().len();
        assert_eq!(cluster.jobs[0].protocol.resume(Some(Version(2)), 0.5), Ok(true));
        let events = disks.events();
        assert!(events.len() > before, "a resume is kept before it is answered");
        drop(cluster);
        let expected = references(&spec, 2).remove(2).hash();
        let checked = |count: usize, failure: Failure, (begun, answered): (bool, bool), image: Image| {
            let cluster = open(&spec, &dirs.with(image)).unwrap();
            let (still, over) =
                ((paused_for(REASON), 1.0, REASON.to_string()), (Phase::Training, 0.5, String::new()));
            let found = found(&cluster);
            assert!(found == still || found == over, "{failure:?} at {count}: {found:?}");
            assert!(begun || found == still, "{failure:?}: nobody has resumed it");
            assert!(!answered || found == over, "{failure:?}: the resume was answered");
            assert_eq!(cluster.hash(), expected);
            // A second resume changes nothing, or takes effect if the crash lost the first one.
            assert_eq!(cluster.jobs[0].protocol.resume(Some(Version(2)), 0.5), Ok(true));
            assert_eq!(self::found(&cluster), over);
        };
        let promise = |count: usize| (count > before, count == events.len());
        each_crash((&Image::new(), &events), before..=events.len(), 1, promise, checked);
    }
}

#[test]
fn pauses_survive_a_killed_process_on_both_tiers() {
    let dirs = Dirs::new(1);
    let storage = &dirs.storage;
    for tier in lasting_tiers() {
        let spec = JobSpec { tier, ..small(0) };
        let mut cluster = paused(&spec, storage);
        let killed = |cluster: Cluster| {
            drop(cluster);
            open(&spec, storage).unwrap()
        };
        cluster = killed(cluster);
        assert_eq!(found(&cluster), (paused_for(REASON), 1.0, REASON.to_string()));
        assert_eq!(cluster.jobs[0].protocol.pauses(), (1, 0, 0.0), "whoever watches is told");
        cluster.jobs[0].protocol.resume(None, 0.5).unwrap();
        cluster = killed(cluster);
        assert_eq!(found(&cluster), (Phase::Training, 0.5, String::new()));
        assert_eq!(
            cluster.jobs[0].protocol.resume(Some(Version(2)), 0.5),
            Ok(true),
            "a late copy of the call"
        );
        // Rank 0 requests a pause without a decision, several times at the same version.
        for round in 0..3 {
            cluster.join(0);
            let reason = format!("the data of round {round}");
            assert_eq!(cluster.jobs[0].protocol.pause(cluster.incarnations[0], &reason), Ok(true));
            assert_eq!(
                cluster.jobs[0].protocol.pause(cluster.incarnations[0], "another"),
                Ok(true),
                "it keeps its reason"
            );
            // A change of servers between two steps writes the record anew, and the pause must stay in it.
            let placement = cluster.jobs[0].placement();
            let placement = Placement { epoch: Epoch(placement.epoch.0 + 1), ..placement };
            let incarnation = cluster.incarnations[0];
            assert_eq!(cluster.jobs[0].place(incarnation, Version(2), placement), Ok(true));
            cluster = killed(cluster);
            assert_eq!(found(&cluster), (paused_for(&reason), 0.5, String::new()));
            cluster.jobs[0].protocol.resume(None, 0.0).unwrap();
            cluster = killed(cluster);
            assert_eq!(found(&cluster), (Phase::Training, 0.5, String::new()));
        }
        // The next step must come with the loss scale that an operator chose.
        cluster.join(0);
        let (flats, _) = step_of(&spec, 3);
        let (mut chunk, payload) = cluster.chunks(3, 0, 0, &flats[0])[0];
        assert_eq!(cluster.store(&chunk, payload).unwrap_err().field, "loss_scale");
        chunk.loss_scale = 0.5;
        cluster.store(&chunk, payload).unwrap();
    }
}
