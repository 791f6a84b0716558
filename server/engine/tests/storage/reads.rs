//! Pulls of images on drives, and prefetches ahead of them. In any order of events, a pull gets the bits of its
//! version, or a fault that the version is gone.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
};

use longshore_engine::{
    job::{Job, Pulled},
    tier::Spill,
};
use longshore_proto::{
    FaultKind, JobSpec, Partition, ServerId, ShardId, Slice, Version, checksum::crc32, limits::CHUNK_BYTES,
};

use super::{
    BLOCK, Dirs,
    common::{Noise, cluster::soon, encode, weights},
    disk::Disks,
    need, references, run_steps, small, started,
};

/// Returns a job of three shards, the largest of ten blocks. A chunk holds eight blocks.
fn wide(max_delay: u32) -> JobSpec {
    let mut spec = small(max_delay);
    (spec.params[0].shape, spec.params[1].shape) = (vec![12 * BLOCK as u64], vec![13 * BLOCK as u64 + 9]);
    spec.shard_elements = 10 * BLOCK as u64;
    spec
}

fn spilled() -> Dirs {
    let mut dirs = Dirs::new(1);
    dirs.storage.spill = Spill::All;
    dirs
}

/// Returns a slice of any shard, at most a chunk long.
fn some_slice(job: &Job, noise: &mut Noise) -> Slice {
    let shard = noise.pick(&job.opened());
    let length = job.layout().shard_len(shard);
    let offset = noise.below(length as usize) as u64;
    let most = (length - offset).min(CHUNK_BYTES as u64 / 2);
    Slice { shard, offset, elements: 1 + noise.below(most as usize) as u64 }
}

fn part_of<'a>(job: &Job, image: &'a [u8], slice: &Slice) -> &'a [u8] {
    let start = job.layout().shard_range(slice.shard).start + slice.offset;
    &image[start as usize * 2..][..slice.elements as usize * 2]
}

fn chunks(job: &Job) -> Vec<Slice> {
    let most = CHUNK_BYTES as u64 / 2;
    let of_shard = |&shard: &ShardId| {
        let length = job.layout().shard_len(shard);
        let chunk = move |offset: u64| Slice { shard, offset, elements: most.min(length - offset) };
        (0..length.div_ceil(most)).map(move |index| chunk(index * most)).collect::<Vec<_>>()
    };
    job.opened().iter().flat_map(of_shard).collect()
}

/// Pulls a slice. Returns None if its version is not there.
fn pulled(job: &Job, slice: &Slice, version: u64) -> Option<Vec<u8>> {
    match job.copy_image(slice, Version(version)) {
        Ok(found) => found.map(|Pulled { bytes, crc32: sum, .. }| {
            assert_eq!(crc32(&bytes), sum);
            bytes
        }),
        Err(fault) => {
            // The version is gone, or is not decided yet.
            assert!(matches!(fault.kind, FaultKind::NotFound | FaultKind::Precondition), "{fault}");
            assert_eq!(fault.field, "version", "{fault}");
            None
        }
    }
}

/// Beside steps, three readers pull any slices of versions around the newest one. Each also announces slices that it
/// never pulls.
#[test]
fn pulls_beside_steps_have_the_bits_of_their_version() {
    const STEPS: u64 = 7;
    const PULLS: u64 = 60;
    for max_delay in [0, 1] {
        let (spec, dirs) = (wide(max_delay), spilled());
        let references = references(&spec, STEPS);
        let mut cluster = started(&spec, &dirs.storage);
        let job = Arc::clone(&cluster.jobs[0]);
        let (pulls, over) = (AtomicU64::new(0), AtomicBool::new(false));
        let found = thread::scope(|scope| {
            let readers: Vec<_> = (0..3u64)
                .map(|seed| {
                    let (job, references, pulls, over) = (&job, &references, &pulls, &over);
                    scope.spawn(move || {
                        let (mut noise, mut found) = (Noise(seed), [0; STEPS as usize + 1]);
                        while !over.load(Ordering::Relaxed) {
                            let newest = job.progress().version.0;
                            let version =
                                (newest + noise.below(2) as u64).saturating_sub(noise.below(3) as u64);
                            for _ in 0..noise.below(6) {
                                let ahead = Version((version + noise.below(2) as u64).saturating_sub(1));
                                job.read_ahead(&some_slice(job, &mut noise), ahead);
                            }
                            let slice = some_slice(job, &mut noise);
                            if let Some(bytes) = pulled(job, &slice, version) {
                                let right = part_of(job, &references[version as usize].image, &slice);
                                assert!(bytes == right, "seed {seed}: {slice:?} of version {version}");
                                found[version as usize] += 1;
                            }
                            pulls.fetch_add(1, Ordering::Relaxed);
                        }
                        found
                    })
                })
                .collect();
            for step in 1..=STEPS {
                run_steps(&mut cluster, step..=step);
                let (enough, deadline) = (pulls.load(Ordering::Relaxed) + PULLS, soon());
                while pulls.load(Ordering::Relaxed) < enough
                    && readers.iter().all(|reader| !reader.is_finished())
                {
                    assert!(std::time::Instant::now() < deadline, "readers wait for ever");
                    thread::yield_now();
                }
            }
            over.store(true, Ordering::Relaxed);
            readers.into_iter().map(|reader| reader.join().unwrap()).collect::<Vec<_>>()
        });
        for version in 1..=STEPS as usize {
            let found: u32 = found.iter().map(|found| found[version]).sum();
            assert!(found > 0, "nobody pulled version {version}");
        }
    }
}

/// After a slot has a newer version, data that was read ahead from there is right or is not served.
#[test]
fn what_was_read_ahead_is_never_served_for_a_newer_version() {
    const STEPS: u64 = 9;
    let (spec, dirs) = (wide(1), spilled());
    let references = references(&spec, STEPS);
    let mut cluster = started(&spec, &dirs.storage);
    let job = Arc::clone(&cluster.jobs[0]);
    for step in 1..=STEPS {
        run_steps(&mut cluster, step..=step);
        for slice in chunks(&job) {
            for version in [step, step - 1] {
                job.read_ahead(&slice, Version(version));
            }
            // The announced version does not exist yet.
            job.read_ahead(&slice, Version(step + 1));
        }
        for version in 0..=step {
            for slice in chunks(&job) {
                let bytes = pulled(&job, &slice, version);
                assert_eq!(
                    bytes.is_some(),
                    version + 1 >= step,
                    "{slice:?} of version {version} after step {step}"
                );
                let right = part_of(&job, &references[version as usize].image, &slice);
                assert!(
                    bytes.is_none_or(|bytes| bytes == right),
                    "{slice:?} of version {version} after step {step}"
                );
            }
        }
    }
}

#[test]
fn frozen_weights_are_read_ahead_as_they_were_given() {
    let mut spec = wide(0);
    spec.partitions = vec![Partition::whole(1), Partition::frozen(1)];
    let dirs = Dirs::new(1);
    let cluster = started(&spec, &dirs.storage);
    let job = &cluster.jobs[0];
    let given = encode(&weights(&spec, 1), spec.image_dtype);
    let frozen = |slice: &Slice| job.layout().is_frozen(slice.shard);
    let mut slices: Vec<Slice> = chunks(job).into_iter().filter(frozen).collect();
    assert!(!slices.is_empty());
    for _ in 0..2 {
        slices.iter().for_each(|slice| job.read_ahead(slice, Version(0)));
        for slice in &slices {
            assert!(pulled(job, slice, 0).unwrap() == part_of(job, &given, slice), "{slice:?}");
        }
        slices.reverse();
    }
}

#[test]
fn a_flipped_bit_of_what_was_read_ahead_is_found_before_it_is_sent() {
    for ahead in [false, true] {
        let (spec, disks) = (wide(0), Disks::default());
        let mut dirs = Dirs::on(&disks, 1);
        dirs.storage.spill = Spill::All;
        let mut cluster = started(&spec, &dirs.storage);
        run_steps(&mut cluster, 1..=1);
        let job = &cluster.jobs[0];
        // DRAM has room for two images, so the first shard's image is only on the drive.
        let slice = chunks(job)[0];
        let image = part_of(job, &references(&spec, 1)[1].image, &slice).to_vec();
        let at = disks.find("data", &image[..4096]).expect("the image's first page");
        disks.flip("data", at + 77, 3);
        if ahead {
            job.read_ahead(&slice, Version(1));
        }
        let fault = job.copy_image(&slice, Version(1)).err().expect("a damaged block");
        assert_eq!(fault.kind, FaultKind::Corrupt, "{fault}");
        for word in ["server-0-of-1/data", "image of shard 0, block 0", "CRC-64"] {
            assert!(fault.to_string().contains(word), "no {word:?} in: {fault}");
        }
        // After that the store refuses every pull.
        assert_eq!(job.copy_image(&chunks(job)[1], Version(1)).err().unwrap(), fault);
    }
}

/// The next owner of a shard asks for one array after the other, a chunk at a time.
#[test]
fn a_shard_that_is_handed_over_is_read_block_by_block() {
    let (spec, disks) = (wide(0), Disks::default());
    let mut dirs = Dirs::on(&disks, 1);
    dirs.storage.buffers = 1;
    let mut cluster = started(&spec, &dirs.storage);
    run_steps(&mut cluster, 1..=1);
    let (job, before) = (&cluster.jobs[0], disks.read_bytes());
    let mut placement = job.placement();
    placement.epoch.0 += 1;
    placement.servers.push("next:7070".into());
    placement.owners.fill(ServerId(1));
    assert_eq!(job.place(cluster.incarnations[0], Version(1), placement), Ok(true));
    let read = |shard, array, bytes| job.read_handed(shard, Version(1), array, bytes);
    let mut bytes = 0;
    for shard in job.opened() {
        for (array, length) in (0..).zip(job.sent_bytes(shard, Version(1)).unwrap()) {
            bytes += length;
            for start in (0..length).step_by(CHUNK_BYTES) {
                let part = start..length.min(start + CHUNK_BYTES);
                assert_eq!(read(shard, array, part.clone()).unwrap().len(), part.len());
            }
        }
    }
    // A checksum covers a block of all three arrays, so each byte may be read up to three times.
    assert!(disks.read_bytes() - before <= 3 * bytes, "{bytes}");
    let last = *job.opened().last().unwrap();
    let page = read(last, 1, 0..4096).unwrap();
    disks.flip("data", disks.find("data", &page).expect("its page") + 77, 3);
    let fault = read(last, 1, 0..4096).unwrap_err();
    assert!(fault.kind == FaultKind::Corrupt && fault.value.contains("block 0 of it"), "{fault}");
}

/// The read window has room for all chunks of a job that has few, and for twelve chunks at most.
#[test]
fn memory_for_pulls_does_not_grow_with_the_model() {
    let buffers = |chunks: u64| {
        let mut spec = small(0);
        spec.shard_elements = BLOCK as u64;
        spec.params[0].shape = vec![chunks * BLOCK as u64];
        spec.params.truncate(1);
        let need = |spill: Spill| need(&spec, spill).buffers;
        // A shard's buffer includes its image.
        let images = 6.min(chunks) * BLOCK as u64 * 2;
        need(Spill::All) - need(Spill::State) - images
    };
    assert_eq!([1, 3, 12, 13, 40].map(|chunks| buffers(chunks) >> 20), [1, 3, 12, 12, 12]);
}
