//! Gradients on the drives: memory does not grow with the model. Every gradient that is used has the bits that were
//! sent.

use std::{
    io::ErrorKind,
    path::Path,
    time::{Duration, Instant},
};

use longshore_engine::{step::Admission, tier::Spill};
use longshore_proto::{FaultKind, ShardId};

use super::{
    Dirs, check,
    common::{BLOCK, cluster::store},
    disk::Disks,
    need, open, references, run_steps, small, started, step_of,
};

fn on(disks: &Disks, spill: Spill) -> Dirs {
    let mut dirs = Dirs::on(disks, 1);
    dirs.storage.spill = spill;
    dirs
}

#[test]
fn memory_for_gradients_does_not_grow_with_the_model() {
    let mut spec = small(1);
    spec.world_size = 4;
    let block = BLOCK as u64;
    let grown = |extra: u64, spill| {
        let mut spec = spec.clone();
        // More blocks mean more shards, and the largest shard stays as large as before.
        spec.params[0].shape = vec![extra * block];
        let need = need(&spec, spill);
        (need.contributions + need.accumulators, need.disk)
    };
    let (few, many) = (grown(2, Spill::All), grown(402, Spill::All));
    assert_eq!(few.0, many.0);
    // A delayed job has its images on the drives with either setting of `spill`.
    let state = (grown(2, Spill::State), grown(402, Spill::State));
    // A gradient has two slots. Each slot has four contributions of 2 bytes and a sum of 4 bytes, in memory or on the
    // drives.
    let gradients = 400 * block * 2 * (4 * 2 + 4);
    assert_eq!(state.1.0 - state.0.0, gradients);
    assert_eq!((many.1 - few.1) - (state.1.1 - state.0.1), gradients);
}

/// `longshore plan` prints the computed bytes that a step writes, so they must be right.
#[test]
fn a_step_writes_what_was_computed_before() {
    for (spill, max_delay, micro_steps, resident) in [
        (Spill::State, 0, 1, 0),
        (Spill::State, 1, 2, 1 << 30),
        (Spill::All, 0, 1, 0),
        (Spill::All, 0, 1, 1 << 30),
        (Spill::All, 1, 2, 0),
    ] {
        let mut spec = small(max_delay);
        spec.micro_steps = micro_steps;
        let mut dirs = on(&Disks::default(), spill);
        dirs.storage.resident_bytes = resident;
        let mut cluster = started(&spec, &dirs.storage);
        let mut step = |number| {
            let before = cluster.jobs[0].written_bytes();
            let (flats, commit) = step_of(&spec, number);
            cluster.step(&vec![flats[0].clone(); micro_steps as usize], &commit);
            cluster.settle().unwrap();
            cluster.jobs[0].written_bytes() - before
        };
        step(1);
        step(2);
        let (written, computed) = (step(3), need(&spec, spill).written);
        // `computed` omits tables and records, which take less than 128 KiB in a job of this size.
        assert!(
            (computed..computed + (1 << 17)).contains(&written),
            "{spill:?}: {written} against {computed}"
        );
    }
}

#[test]
fn a_gradient_that_cannot_be_written_is_the_end_of_the_job_here() {
    let spec = small(0);
    for (kind, says) in
        [(ErrorKind::Other, FaultKind::Internal), (ErrorKind::StorageFull, FaultKind::Exhausted)]
    {
        let disks = Disks::default();
        let dirs = on(&disks, Spill::All);
        let mut cluster = started(&spec, &dirs.storage);
        run_steps(&mut cluster, 1..=1);
        disks.fail_write(1, kind);
        let (flats, _) = step_of(&spec, 2);
        let (chunk, payload) = cluster.chunks(2, 0, 0, &flats[0]).remove(0);
        let fault = cluster.store(&chunk, payload).unwrap_err();
        assert_eq!(fault.kind, says, "{fault}");
        assert!(fault.value.contains("server-0-of-1/gradients (write gradients"), "{fault}");
        assert_eq!(cluster.store(&chunk, payload).unwrap_err(), fault);
        drop(cluster);
        assert_eq!(check(&open(&spec, &dirs.storage).unwrap(), &references(&spec, 1)), 1);
    }
}

#[test]
fn a_drive_that_answers_no_push_is_the_end_of_the_job_here() {
    let spec = small(0);
    let disks = Disks::default();
    let dirs = on(&disks, Spill::All);
    let cluster = started(&spec, &dirs.storage);
    let job = &cluster.jobs[0];
    let (flats, _) = step_of(&spec, 1);
    let (chunk, payload) = cluster.chunks(1, 0, 0, &flats[0]).remove(0);
    disks.slow_writes(Path::new("/"), Duration::from_secs(2));
    store(job, &chunk, payload).unwrap();
    job.check_drives(Instant::now()).unwrap();
    let fault = job.check_drives(Instant::now() + Duration::from_secs(180)).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Deadline, "{fault}");
    assert!(fault.value.contains("server-0-of-1/gradients (silent for 180 s"), "{fault}");
    assert_eq!(store(job, &chunk, payload).unwrap_err(), fault);
}

#[test]
fn a_flipped_bit_in_a_gradient_is_found_before_it_is_used() {
    for micro_steps in [1, 2] {
        let mut spec = small(0);
        spec.micro_steps = micro_steps;
        let disks = Disks::default();
        let dirs = on(&disks, Spill::All);
        let mut cluster = started(&spec, &dirs.storage);
        let (flats, commit) = step_of(&spec, 1);
        let flats = vec![flats[0].clone(); micro_steps as usize];
        cluster.push(1, &flats);
        // The bit is in the last shard's contribution. With micro-steps it is in the sum behind the contributions.
        let slot = BLOCK as u64 * if micro_steps > 1 { 6 } else { 2 };
        let last = cluster.layout.shards() as u64 - 1;
        let at = last * slot + if micro_steps > 1 { 2 * BLOCK as u64 } else { 0 } + 4099;
        disks.flip("gradients", at, 5);
        cluster.commit(&commit).unwrap();
        let fault = cluster.settle().unwrap_err();
        assert_eq!(fault.kind, FaultKind::Corrupt, "{fault}");
        let what = if micro_steps > 1 { "summed gradient of" } else { "gradient of" };
        for word in ["server-0-of-1/gradients", what, &format!("{}", ShardId(last as u32)), "MiB 0"] {
            assert!(fault.to_string().contains(word), "no {word:?} in: {fault}");
        }
        drop(cluster);
        assert_eq!(open(&spec, &dirs.storage).unwrap().jobs[0].progress().version.0, 0);
    }
}

/// A chunk that stays incomplete gives its buffer back for others.
#[test]
fn chunks_that_do_not_come_whole_leave_their_buffers() {
    let spec = small(0);
    let dirs = on(&Disks::default(), Spill::All);
    let mut cluster = started(&spec, &dirs.storage);
    let (flats, _) = step_of(&spec, 1);
    let chunks = cluster.chunks(1, 0, 0, &flats[0]);
    for _ in 0..100 {
        let (chunk, payload) = &chunks[0];
        assert!(store(&cluster.jobs[0], chunk, &payload[1..]).is_err());
        let damaged = longshore_proto::ContributionChunk { crc32: !chunk.crc32, ..*chunk };
        assert!(store(&cluster.jobs[0], &damaged, payload).is_err());
    }
    for (chunk, payload) in &chunks {
        assert!(matches!(cluster.store(chunk, payload), Ok(Admission::New(_))));
    }
}
