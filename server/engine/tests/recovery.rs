//! Promise 3 inside one server: workers die at any point of a step and join again. The run ends with the bits of a run
//! without deaths.

use longshore_engine::{kernels::Isa, step::Admission};
use longshore_proto::{
    Commit, ContributionChunk, Dtype, Fault, FaultKind, Incarnation, JobSpec, Origin, Rank, Reads, ShardId,
    Step, TierKind, Version,
};

use crate::common::{
    self, BLOCK, Dirs,
    cluster::{Cluster, compute},
    commit, gradient,
    reference::Reference,
    spec, weights,
};

/// A job of three shards over two servers. The first two shards have two chunks each.
fn shape(world_size: u32, micro_steps: u32, max_delay: u32) -> JobSpec {
    let mut spec = spec(&[3, 11 * BLOCK as u64, 99], &[0, 1, 0]);
    spec.shard_elements = 5 * BLOCK as u64;
    (spec.gradient_dtype, spec.image_dtype) = (Dtype::F32, Dtype::F16);
    (spec.world_size, spec.micro_steps, spec.max_delay) = (world_size, micro_steps, max_delay);
    spec
}

fn step_gradients(spec: &JobSpec, seed: u64) -> Vec<Vec<u8>> {
    (0..spec.contributions(spec.world_size)).map(|index| gradient(spec, seed * 100 + index, 1.0)).collect()
}

fn reference(spec: &JobSpec, steps: &[&Vec<Vec<u8>>]) -> String {
    let mut reference = Reference::new(spec, &weights(spec, 1));
    for (index, step) in steps.iter().enumerate() {
        reference.step(step, &commit(spec, index as u64 + 1));
    }
    reference.hash()
}

/// Returns the chunks of a whole step, in the order in which a worker sends them.
fn all_chunks<'a>(cluster: &Cluster, step: u64, flats: &'a [Vec<u8>]) -> Vec<(ContributionChunk, &'a [u8])> {
    let world = cluster.spec.world_size;
    let flats = flats.iter().enumerate();
    flats.flat_map(|(at, flat)| cluster.chunks(step, at as u32 / world, at as u32 % world, flat)).collect()
}

fn finish(cluster: &mut Cluster, step: u64, flats: &[Vec<u8>]) {
    cluster.push(step, flats);
    let commit = commit(&cluster.spec, step);
    cluster.commit(&commit).unwrap();
    cluster.work();
}

/// Sends the first `count` chunks of a step, and makes sums as soon as they are complete.
fn send_some(cluster: &mut Cluster, step: u64, flats: &[Vec<u8>], count: usize) {
    for (chunk, payload) in all_chunks(cluster, step, flats).into_iter().take(count) {
        assert!(matches!(cluster.store(&chunk, payload), Ok(Admission::New(_))));
        cluster.work();
    }
}

#[test]
fn a_lone_worker_killed_after_any_chunk_starts_its_step_over() {
    for (micro_steps, max_delay) in [(1, 0), (2, 0), (2, 1)] {
        let spec = shape(1, micro_steps, max_delay);
        let (first, second, other) =
            (step_gradients(&spec, 1), step_gradients(&spec, 2), step_gradients(&spec, 3));
        let (same_bits, other_bits) =
            (reference(&spec, &[&first, &second]), reference(&spec, &[&first, &other]));
        let probe =
            Cluster::open(&spec, 2, &common::cluster::compute(1, longshore_engine::kernels::Isa::Scalar));
        let chunks = all_chunks(&probe, 2, &second).len();
        for killed_after in 0..=chunks {
            let recomputed =
                if killed_after % 2 == 0 { (&second, &same_bits) } else { (&other, &other_bits) };
            let mut cluster = Cluster::started(&spec, 2, &weights(&spec, 1));
            finish(&mut cluster, 1, &first);
            send_some(&mut cluster, 2, &second, killed_after);
            let stale = all_chunks(&cluster, 2, &second)[0];
            cluster.join(0);
            let fault = cluster.store(&stale.0, stale.1).unwrap_err();
            assert_eq!((fault.kind, fault.field.as_str()), (FaultKind::Fenced, "incarnation"));
            assert!(
                cluster.jobs[0]
                    .protocol
                    .waiting_for()
                    .unwrap()
                    .starts_with("step 2, micro-step 0, shard 0 from rank 0")
            );
            finish(&mut cluster, 2, recomputed.0);
            assert_eq!(cluster.hash(), *recomputed.1, "killed after {killed_after} chunks");
        }
    }
}

/// A rank that joins again loses its chunks that are in no sum. Sums and the other rank's chunks stay, and no
/// contribution counts twice.
#[test]
fn one_of_two_ranks_killed_after_any_chunk_resends() {
    for max_delay in [0, 1] {
        let spec = shape(2, 2, max_delay);
        let (first, second) = (step_gradients(&spec, 1), step_gradients(&spec, 2));
        let expected = reference(&spec, &[&first, &second]);
        let probe =
            Cluster::open(&spec, 2, &common::cluster::compute(1, longshore_engine::kernels::Isa::Scalar));
        let chunks = all_chunks(&probe, 2, &second).len();
        for killed_after in (0..=chunks).step_by(2) {
            let rank = (killed_after / 2 % 2) as u32;
            let mut cluster = Cluster::started(&spec, 2, &weights(&spec, 1));
            finish(&mut cluster, 1, &first);
            send_some(&mut cluster, 2, &second, killed_after);
            cluster.join(rank);
            finish(&mut cluster, 2, &second);
            assert_eq!(cluster.hash(), expected, "rank {rank} killed after {killed_after} chunks");
        }
    }
}

/// The new process of a rank may send other bits for contributions that are in no sum. While the step has no
/// contribution at all, the loss scale may differ too.
#[test]
fn a_rank_that_rejoins_may_bring_other_bits_for_what_is_not_summed() {
    let spec = shape(2, 1, 0);
    let (flats, other) = (step_gradients(&spec, 1), step_gradients(&spec, 2));
    let mut cluster = Cluster::started(&spec, 1, &weights(&spec, 1));
    for (mut chunk, payload) in cluster.chunks(1, 0, 1, &flats[1]).into_iter().take(3) {
        chunk.loss_scale = 64.0;
        assert_eq!(cluster.store(&chunk, payload), Ok(Admission::New(None)));
    }
    cluster.join(1);
    let mixed = vec![flats[0].clone(), other[1].clone()];
    finish(&mut cluster, 1, &mixed);
    assert_eq!(cluster.hash(), reference(&spec, &[&mixed]));
}

#[test]
fn a_rank_that_left_is_named_and_may_join_again() {
    let spec = shape(2, 1, 0);
    let flats = step_gradients(&spec, 1);
    let mut cluster = Cluster::started(&spec, 1, &weights(&spec, 1));
    let job = cluster.jobs[0].clone();
    job.protocol.leave(Rank(1), Incarnation(1)).unwrap();
    assert!(job.protocol.waiting_for().unwrap().ends_with("rank 0, rank 1 (left)"));
    let (chunk, payload) = cluster.chunks(1, 0, 1, &flats[1])[0];
    let fault: Fault = cluster.store(&chunk, payload).unwrap_err();
    assert_eq!((fault.kind, fault.field.as_str()), (FaultKind::Precondition, "incarnation"));
    cluster.join(1);
    finish(&mut cluster, 1, &flats);
    assert_eq!(cluster.hash(), reference(&spec, &[&flats]));
}

/// A process that has joined again may still read the version that the next update overwrites. The update therefore
/// waits for the process's gradient.
#[test]
fn a_delayed_step_waits_for_the_gradients_of_present_processes() {
    let spec = shape(2, 1, 1);
    let flats = step_gradients(&spec, 1);
    let mut cluster = Cluster::started(&spec, 2, &weights(&spec, 1));
    cluster.push(1, &flats);
    cluster.join(1);
    let (shard, decided_by) = (cluster.jobs[0].opened()[0], cluster.incarnations[0]);
    let decision = Commit { decided_by, ..commit(&spec, 1) };
    assert!(cluster.jobs[0].statistics(shard, Step(1)).unwrap().is_none());
    assert_eq!(cluster.commit(&decision).unwrap_err().kind, FaultKind::Precondition);
    for (chunk, payload) in cluster.chunks(1, 0, 1, &flats[1]) {
        assert_eq!(cluster.store(&chunk, payload), Ok(Admission::Superseded));
    }
    assert!(cluster.jobs[0].statistics(shard, Step(1)).unwrap().is_some());
    cluster.commit(&decision).unwrap();
    cluster.work();
    assert_eq!(cluster.hash(), reference(&spec, &[&flats]));
}

/// All gradients of a step have one version and one loss scale. The death of all its processes does not change that.
#[test]
fn a_sum_keeps_what_it_was_computed_with() {
    for restarts in [false, true] {
        let (spec, dirs) = (JobSpec { tier: TierKind::Shm, ..shape(2, 1, 1) }, Dirs::new(0));
        let open = || Cluster::try_open(&spec, 1, &compute(2, Isa::detect()), &dirs.storage).unwrap();
        let mut cluster = open();
        (0..2).for_each(|rank| cluster.join(rank));
        cluster.upload(&weights(&spec, 1));
        for step in 1..=2 {
            cluster.push(step, &step_gradients(&spec, step));
            cluster.commit(&Commit { loss_scale: step as f64, ..commit(&spec, step) }).unwrap();
            cluster.work();
        }
        let flats = step_gradients(&spec, 3);
        let send = |cluster: &mut Cluster, rank: u32, shard: u32, (version, loss_scale): (u64, f64)| {
            let reads = Reads { version: Version(version), decided_by: Incarnation::default() };
            for (chunk, payload) in cluster.chunks(3, 0, rank, &flats[rank as usize]) {
                if chunk.contribution.shard == ShardId(shard) {
                    cluster.store(&ContributionChunk { loss_scale, reads, ..chunk }, payload)?;
                }
            }
            Ok::<_, Fault>(())
        };
        (0..2).for_each(|rank| send(&mut cluster, rank, 0, (1, 1.0)).unwrap());
        cluster.work();
        if restarts {
            drop(cluster);
            cluster = open();
        }
        (0..2).for_each(|rank| cluster.join(rank));
        for (with, field) in [((2, 1.0), "push.reads_version"), ((1, 2.0), "loss_scale")] {
            let fault = send(&mut cluster, 0, 1, with).unwrap_err();
            assert_eq!((fault.kind, &*fault.field), (FaultKind::Conflict, field), "{restarts}: {fault}");
        }
        send(&mut cluster, 0, 1, (1, 1.0)).unwrap();
    }
}

/// The next process of a lone rank repeats the whole step. A restarted server therefore restores no sum of the earlier
/// process.
#[test]
fn sums_of_a_replaced_lone_worker_stay_away_after_a_restart() {
    let (spec, dirs) = (JobSpec { tier: TierKind::Shm, ..shape(1, 1, 0) }, Dirs::new(0));
    let open = || Cluster::try_open(&spec, 1, &compute(2, Isa::detect()), &dirs.storage).unwrap();
    let is_summed = |cluster: &Cluster| cluster.jobs[0].statistics(ShardId(0), Step(1)).unwrap().is_some();
    let mut cluster = open();
    cluster.join(0);
    cluster.upload(&weights(&spec, 1));
    cluster.push(1, &step_gradients(&spec, 1));
    drop(cluster);
    let mut cluster = open();
    assert!(is_summed(&cluster), "the sum outlives the server");
    cluster.join(0);
    drop(cluster);
    assert!(!is_summed(&open()));
}

/// A decision belongs to its contributions. Once another process's gradient has replaced one of them, servers refuse
/// the decision, and nothing changes.
#[test]
fn a_decision_made_from_other_contributions_is_refused() {
    let spec = shape(2, 1, 0);
    let flats = step_gradients(&spec, 1);
    let mut cluster = Cluster::started(&spec, 1, &weights(&spec, 1));
    let job = cluster.jobs[0].clone();
    let origin = |job: &longshore_engine::job::Job| {
        let shards = job.opened().into_iter().map(|shard| job.origin(shard, Step(1)).unwrap());
        shards.reduce(Origin::and).unwrap()
    };
    assert_eq!(origin(&job), Origin::UNKNOWN, "nothing is summed");
    // The first process of rank 1 sends one chunk, and the second process sends all.
    let (chunk, payload) = cluster.chunks(1, 0, 1, &flats[1])[0];
    cluster.store(&chunk, payload).unwrap();
    cluster.join(1);
    cluster.push(1, &flats);
    let made_from = origin(&job);
    assert_ne!(made_from, Origin::UNKNOWN);
    let (decision, zero) = (commit(&spec, 1), cluster.incarnations[0]);
    let fault = job.commit_from(zero, decision.clone(), Origin(made_from.0 ^ 1)).unwrap_err();
    assert_eq!((fault.kind, fault.field.as_str()), (FaultKind::Conflict, "commit.origin"));
    assert_eq!(job.progress().version.0, 0);
    let (duplicate, work) = job.commit_from(zero, decision, made_from).unwrap();
    assert!(!duplicate);
    cluster.works[0].extend(work);
    cluster.work();
    assert_eq!(cluster.hash(), reference(&spec, &[&flats]));
}

/// A rank of a delayed job may be a step ahead. Its gradient then names a version that the server has not reached.
#[test]
fn what_was_computed_with_a_version_that_is_not_reached_waits_until_it_can_be_judged() {
    let spec = shape(1, 1, 1);
    let gradients: Vec<_> = (1..=2).map(|seed| step_gradients(&spec, seed)).collect();
    let mut cluster = Cluster::started(&spec, 1, &weights(&spec, 1));
    let reads =
        |decided_by| Reads { version: longshore_proto::Version(1), decided_by: Incarnation(decided_by) };
    let (chunk, payload) = all_chunks(&cluster, 2, &gradients[1])[0];
    let [stale, right] = [6, 7].map(|decided_by| ContributionChunk { reads: reads(decided_by), ..chunk });
    assert_eq!(cluster.store(&stale, payload), Ok(Admission::Busy));
    assert_eq!(cluster.store(&right, payload), Ok(Admission::Busy));
    cluster.push(1, &gradients[0]);
    cluster.commit(&Commit { decided_by: Incarnation(7), ..commit(&spec, 1) }).unwrap();
    let fault = cluster.store(&stale, payload).unwrap_err();
    assert_eq!((fault.kind, fault.field.as_str()), (FaultKind::Conflict, "push.reads"));
    assert_eq!(cluster.store(&right, payload), Ok(Admission::New(None)));
}
