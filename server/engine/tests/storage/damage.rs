//! Bit rot: one bit flips in each kind of byte. The store must find the damage before it uses the byte.

use std::{fs, os::unix::fs::FileExt, path::Path};

use longshore_engine::{
    job::inspect,
    tier::{Spill, Storage},
};
use longshore_proto::{FaultKind, Formats, JobSpec, MasterFormat, ServerId, StateFormat, TierKind, Version};

use super::{
    BLOCK, Cluster, Dirs, check,
    common::Noise,
    disk::{self, Disks, Image},
    host, need_on, open, references, run_steps, small, started, weights,
};

const RECORDS: u64 = 4 << 20;
const TABLES: u64 = 4 * RECORDS;

fn flip(image: &Image, at: u64, bit: u32) -> Option<Image> {
    let mut image = image.clone();
    disk::flip(image.values_mut().next().unwrap(), at, bit).map(|()| image)
}

#[test]
fn a_flipped_bit_in_a_slot_is_named_and_the_version_before_is_served() {
    let spec = small(0);
    let disks = Disks::default();
    let dirs = Dirs::on(&disks, 1);
    let mut cluster = started(&spec, &dirs.storage);
    run_steps(&mut cluster, 1..=4);
    drop(cluster);
    let references = references(&spec, 4);
    let image = disks.image();
    // The file has three shards of one block each, five tables of one sector each, and two slots. The newest version's
    // state is in slot 1, so a bit in slot 0 does no harm.
    let shard = 12 * BLOCK as u64;
    let slots = TABLES + 5 * 4096;
    let mut noise = Noise(7);
    for slot in 0..2 {
        for index in 0..3 {
            let at = slots + (slot * 3 + index) * shard + noise.below(shard as usize) as u64;
            let bit = noise.below(8) as u32;
            let with =
                |at_most: Option<Version>| Storage { at_most, ..dirs.with(flip(&image, at, bit).unwrap()) };
            if slot == 0 {
                assert_eq!(check(&open(&spec, &with(None)).unwrap(), &references), 4);
                continue;
            }
            let fault = open(&spec, &with(None)).err().unwrap();
            assert_eq!(fault.kind, FaultKind::Corrupt);
            for word in ["server-0-of-1/data", &format!("shard {index}, block 0"), "version 3 is whole"] {
                assert!(fault.to_string().contains(word), "no {word:?} in: {fault}");
            }
            assert_eq!(check(&open(&spec, &with(Some(Version(3)))).unwrap(), &references), 3);
        }
    }
}

#[test]
fn a_flipped_bit_in_a_record_or_a_table_is_found() {
    let spec = small(1);
    let disks = Disks::default();
    let dirs = Dirs::on(&disks, 1);
    let mut cluster = started(&spec, &dirs.storage);
    run_steps(&mut cluster, 1..=3);
    drop(cluster);
    let references = references(&spec, 3);
    let image = disks.image();
    let reopen = |image: Image| open(&spec, &dirs.with(image));
    let mut noise = Noise(9);
    for _ in 0..40 {
        // With one damaged copy of a record, recovery takes the record's other copy.
        let at = noise.below(4) as u64 * RECORDS + noise.below(600) as u64;
        let flipped = flip(&image, at, noise.below(8) as u32).unwrap();
        assert_eq!(check(&reopen(flipped).unwrap(), &references), 3, "byte {at}");
        // With both copies of the newest record damaged, recovery takes the version before, which is whole.
        let both = flip(&image, 2 * RECORDS + noise.below(600) as u64, 1).unwrap();
        let both = flip(&both, 3 * RECORDS + noise.below(600) as u64, 1).unwrap();
        assert_eq!(check(&reopen(both).unwrap(), &references), 2);
    }
    let mut found = 0;
    for table in 0..5 {
        let flipped = flip(&image, TABLES + table * 4096 + noise.below(24) as u64, 3);
        let Some(flipped) = flipped else { continue };
        match reopen(flipped) {
            Ok(cluster) => assert_eq!(check(&cluster, &references), 3),
            Err(fault) => {
                assert_eq!(fault.kind, FaultKind::Corrupt, "{fault}");
                assert!(fault.value.contains("checksum table"), "{fault}");
                // The version before may have the same image table, and nobody has read its blocks.
                assert!(fault.remedy.contains("where that one is whole"), "{fault}");
                found += 1;
            }
        }
    }
    // Three tables belong to the recovered version: one of two state tables, and two of three image tables.
    assert_eq!(found, 3);
}

fn flip_file(path: &Path, at: u64) {
    let file = fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 4], at).unwrap();
}

#[test]
fn every_flipped_byte_of_a_header_is_found() {
    let spec = small(0);
    let dirs = Dirs::new(1);
    drop(started(&spec, &dirs.storage));
    let path = dirs.folder(0).join("header.json");
    for at in 0..fs::metadata(&path).unwrap().len() {
        flip_file(&path, at);
        let fault = inspect(&dirs.folder(0)).unwrap_err();
        assert!(fault.to_string().contains("header.json"), "byte {at}: {fault}");
        flip_file(&path, at);
    }
    assert!(open(&spec, &dirs.storage).is_ok());
}

#[test]
fn inspection_reads_everything_and_says_what_can_be_recovered() {
    let block = BLOCK as u64;
    // Bytes of a slot of a one-block shard. The last number is the place of the second moments in the slot.
    let fp32 = (Formats::default(), 12 * block, 8 * block);
    let low = Formats { state: StateFormat::Block8, master: MasterFormat::Bf16, seed: 5 };
    // An element takes 2 bytes for the master weight and 1 for each moment. The 512 scales add half a sector, so the
    // slot is rounded up to whole sectors.
    let low = (low, 4 * block + 4096, 3 * block + 1024);
    for (max_delay, (formats, slot_bytes, second)) in [(0, fp32), (1, fp32), (0, low), (1, low)] {
        let spec = JobSpec { formats, ..small(max_delay) };
        let dirs = Dirs::new(2);
        let mut cluster = started(&spec, &dirs.storage);
        run_steps(&mut cluster, 1..=3);
        let fault = inspect(&dirs.folder(0)).unwrap_err();
        assert!(fault.value.contains("in use by another process"), "{fault}");
        drop(cluster);
        for directory in 0..2 {
            let report = inspect(&dirs.folder(directory)).unwrap();
            assert_eq!((report.records, report.broken_records.len()), (4, 0));
            assert_eq!(report.recoverable(), Some(Version(3)));
            let versions: Vec<u64> = report.versions.iter().map(|version| version.version.0).collect();
            assert_eq!(versions, [2, 3]);
            assert!(report.versions.iter().all(|version| version.damaged.is_empty() && version.blocks > 0));
        }
        // The damage is in the first block of the second shard, in the slot of version 3.
        let folder = dirs.folder(1);
        let slot = u64::from(inspect(&folder).unwrap().versions[1].state_slot);
        for inside in [99, second, slot_bytes.min(second + block) - 1] {
            let at = TABLES + 5 * 4096 + slot * slot_bytes + inside;
            flip_file(&folder.join("data"), at);
            let report = inspect(&folder).unwrap();
            assert_eq!(report.recoverable(), Some(Version(2)));
            let damaged = &report.versions[1].damaged;
            assert!(damaged[0].contains("shard 1, block 0"), "byte {inside}: {damaged:?}");
            flip_file(&folder.join("data"), at);
        }
        if max_delay > 0 {
            // The three image slots of a delayed job lie behind the state's slots.
            let images = TABLES + 5 * 4096 + 2 * slot_bytes;
            (0..3).for_each(|slot| flip_file(&folder.join("data"), images + slot * 2 * block + 77));
            let report = inspect(&folder).unwrap();
            assert!(report.versions.iter().all(|version| !version.damaged.is_empty()), "{report:?}");
        }
    }
}

#[test]
fn images_on_the_drives_need_not_fit_in_memory() {
    let spec = small(0);
    let need = |spill| need_on(&spec, Storage { spill, buffers: 2, ..Storage::default() });
    let (state, all) = (need(Spill::State), need(Spill::All));
    let image = 2 * BLOCK as u64;
    // DRAM holds two images of each of three shards, or with `all` two images of a single shard.
    assert_eq!((state.images, all.images), (6 * image, 2 * image + 16));
    // Each image has three slots on the drives. A gradient is as long as an image.
    let gradients = 3 * spec.gradient_slots() as u64 * image;
    assert_eq!(all.disk - state.disk, 3 * 3 * image + gradients);
}

/// A store opens only with the settings that it was made with.
#[test]
fn a_store_is_not_opened_with_images_elsewhere() {
    let spec = small(0);
    let dirs = Dirs::new(1);
    drop(started(&spec, &dirs.storage));
    let fault = open(&spec, &Storage { spill: Spill::All, ..dirs.storage.clone() }).err().unwrap();
    assert_eq!(fault.kind, FaultKind::Conflict);
    assert!(fault.to_string().contains("made with --spill all"), "{fault}");
    assert!(open(&spec, &dirs.storage).is_ok());
}

/// Damage and a newer format in files of tier `shm` are named, and nothing is deleted.
#[test]
fn state_of_tier_shm_that_cannot_be_read_is_refused_and_left_as_it_is() {
    let spec = JobSpec { tier: TierKind::Shm, ..small(1) };
    let dirs = Dirs::new(0);
    let storage = &dirs.storage;
    let mut cluster = started(&spec, storage);
    run_steps(&mut cluster, 1..=4);
    let hash = cluster.hash();
    drop(cluster);
    let home = dirs.of(TierKind::Shm).join("test/server-0-of-1");
    let block = 4 * BLOCK as u64;
    // The newest record is that of version 4. In the file of buffers, images come first.
    let cases = [
        ("progress", vec![40], "progress"),
        ("progress", vec![RECORDS + 40], "progress"),
        ("progress", vec![40, RECORDS + 40], "progress"),
        ("progress", vec![2 * RECORDS + 7], "progress"),
        ("state", vec![99], "state (block 0 of it)"),
        ("state", vec![3 * block + 5], "state (block 1 of it)"),
        ("buffers", vec![99], "buffers (an image of block 0 of it)"),
    ];
    for (file, places, named) in cases {
        places.iter().for_each(|&at| flip_file(&home.join(file), at));
        let fault = open(&spec, storage).err().unwrap();
        assert_eq!(fault.kind, FaultKind::Corrupt, "{file}: {fault}");
        assert!(fault.value.contains(named) && fault.remedy.contains("nothing was deleted"), "{fault}");
        let report = inspect(&home).unwrap();
        let is_found = report.damage.len() + report.broken_records.len() > 0;
        assert_eq!(is_found, file != "buffers", "{file}: {report:?}");
        places.iter().for_each(|&at| flip_file(&home.join(file), at));
    }
    let newer = [b"LONGSREC".as_slice(), &4u32.to_le_bytes(), &[7; 100]].concat();
    let progress = fs::OpenOptions::new().read(true).write(true).open(home.join("progress")).unwrap();
    let mut before = vec![0; newer.len()];
    progress.read_exact_at(&mut before, 0).unwrap();
    progress.write_all_at(&newer, 0).unwrap();
    let fault = open(&spec, storage).err().unwrap();
    assert!(fault.remedy.starts_with("start the newer version"), "{fault}");
    progress.write_all_at(&before, 0).unwrap();
    assert_eq!(open(&spec, storage).unwrap().hash(), hash);
}

/// A store of tier `shm` in format 1 has places only for the shards with which it was made.
#[test]
fn a_tmpfs_store_of_format_1_goes_on_and_takes_no_other_shard() {
    let spec = JobSpec { tier: TierKind::Shm, ..small(1) };
    let dirs = Dirs::new(0);
    let open = || Cluster::try_open(&spec, 2, &host(), &dirs.storage).unwrap();
    drop(open());
    let homes = [0, 1].map(|server| dirs.of(TierKind::Shm).join(format!("test/server-{server}-of-2")));
    // A store without loaded weights is made anew in the format that its header names. An edited header is therefore
    // enough.
    for home in &homes {
        let header = fs::read_to_string(home.join("header.json")).unwrap();
        let older = header.replacen("\"format_version\":2", "\"format_version\":1", 1);
        assert_ne!(older, header);
        fs::write(home.join("header.json"), older).unwrap();
    }
    let mut cluster = open();
    cluster.join(0);
    cluster.upload(&weights(&spec, 1));
    run_steps(&mut cluster, 1..=3);
    let hash = cluster.hash();
    drop(cluster);
    homes.iter().for_each(|home| assert!(inspect(home).unwrap().is_whole()));
    let cluster = open();
    assert_eq!(cluster.hash(), hash);
    let [here, elsewhere] = [0, 1].map(|server| cluster.placement.owned(ServerId(server)));
    assert_eq!(cluster.jobs[0].make_room(&here, |_, _| Ok(())), Ok(()));
    let fault = cluster.jobs[0].make_room(&elsewhere, |_, _| Ok(())).unwrap_err();
    assert_eq!((fault.kind, fault.field.as_str()), (FaultKind::Precondition, "shm_dir"));
    assert!(fault.value.contains("format 1: without a place for shard 1"), "{fault}");
}
