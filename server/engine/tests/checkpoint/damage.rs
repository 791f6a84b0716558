//! No altered byte of a checkpoint is restored. After a refused restore, the job can still be restored from a good
//! checkpoint.

use std::{fs, sync::OnceLock};

use longshore_engine::{
    checkpoint::Manifest,
    job::{CheckpointId, StoredImages},
    record::Record,
    tier::Spill,
};
use proptest::prelude::*;

use super::*;

/// A good checkpoint of a delayed job on two servers, and a job to restore into. Failed restores leave the job loading.
struct Fixture {
    _root: tempfile::TempDir,
    store: Store,
    target: Trained,
    state_hash: String,
}

const PART: &str = "server-00002-of-00002.safetensors";

fn fixture() -> Fixture {
    let (root, store) = store();
    let saved = Trained::after(&spec(2, 1), 2, 2);
    saved.save(&store, "good");
    let target = Trained::open(&spec(1, 1), 1);
    Fixture { _root: root, store, target, state_hash: saved.state_hash() }
}

impl Fixture {
    fn path(&self, file: &str) -> std::path::PathBuf {
        self.store.dir().join("run/good").join(file)
    }

    /// Returns the fault of a restore while `file` is altered. Afterwards `file` has its good bytes again.
    fn fault_with(&self, file: &str, alter: impl FnOnce(&mut Vec<u8>)) -> Result<Fault, TestCaseError> {
        let path = self.path(file);
        let good = fs::read(&path).unwrap();
        let mut bad = good.clone();
        alter(&mut bad);
        fs::write(&path, &bad).unwrap();
        let result = self.target.restore(&self.store, "good");
        fs::write(&path, &good).unwrap();
        prop_assert!(self.target.is_loading());
        let fault = result.err().ok_or_else(|| TestCaseError::fail("the damage passed"))?;
        prop_assert!(fault.value.contains(file), "{}", fault);
        prop_assert!(fault.remedy.contains("another checkpoint"), "{}", fault);
        Ok(fault)
    }
}

fn shared() -> &'static std::sync::Mutex<Fixture> {
    static SHARED: OnceLock<std::sync::Mutex<Fixture>> = OnceLock::new();
    SHARED.get_or_init(|| std::sync::Mutex::new(fixture()))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn an_altered_byte_is_found(
        file in prop_oneof![Just(PART), Just("manifest.json")],
        at in any::<prop::sample::Index>(),
        near_an_end in prop_oneof![Just(None), (0usize..6000).prop_map(Some)],
        mask in 1u8..,
    ) {
        let fixture = shared().lock().unwrap();
        let fault = fixture.fault_with(file, |bytes| {
            // Half of the changes hit header and tail, which are small beside the tensors.
            let at = match near_an_end {
                Some(near) if near % 2 == 0 => near % bytes.len(),
                Some(near) => bytes.len() - 1 - near % bytes.len(),
                None => at.index(bytes.len()),
            };
            bytes[at] ^= mask;
        })?;
        prop_assert_eq!(fault.kind, FaultKind::Corrupt, "{}", fault);
    }

    #[test]
    fn a_truncated_file_is_found(
        file in prop_oneof![Just(PART), Just("manifest.json")],
        at in any::<prop::sample::Index>(),
    ) {
        let fixture = shared().lock().unwrap();
        let fault = fixture.fault_with(file, |bytes| bytes.truncate(at.index(bytes.len())))?;
        prop_assert_eq!(fault.kind, FaultKind::Corrupt, "{}", fault);
    }
}

#[test]
fn a_damaged_block_is_named_and_a_good_checkpoint_still_restores() {
    let fixture = fixture();
    let find = |name: &str| {
        let bytes = fs::read(fixture.path(PART)).unwrap();
        let (header, metadata) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        8 + header + metadata.info(name).unwrap().data_offsets.1 - 1
    };
    for (array, what) in [
        ("master", "weights and optimizer state of shard 1, block 3"),
        ("first", "weights and optimizer state of shard 1, block 3"),
        ("second", "weights and optimizer state of shard 1, block 3"),
        ("image", "(image of shard 1, block 3"),
        ("older_image", "(older image of shard 1, block 3"),
    ] {
        let at = find(&format!("shard.000001.{array}"));
        let fault = fixture.fault_with(PART, |bytes| bytes[at] ^= 1).unwrap();
        assert_eq!(fault.kind, FaultKind::Corrupt);
        assert!(fault.value.contains(what), "{fault}");
    }
    let info = fixture.target.restore(&fixture.store, "good").unwrap().remove(0);
    assert_eq!(info.state_hash.as_ref(), Some(&fixture.state_hash));
    assert_eq!(fixture.target.state_hash(), fixture.state_hash);
}

/// A failed load had filled this shard with state and images, of the same version as the next load's.
#[test]
fn a_failed_load_leaves_neither_images_nor_moments() {
    let target = Trained::open(&spec(3, 1), 1);
    let job = &target.jobs[0];
    let origin = CheckpointId { name: "a".to_string(), id: "a".to_string() };
    let record = Record::new(Version(0), 0, None);
    let failed = job.load(origin, record, StoredImages::Current, &mut |shard, loaded| {
        loaded.state.arrays.into_iter().for_each(|array| array.fill(7));
        loaded.image.unwrap().fill(7);
        if shard.0 == 0 { Ok(()) } else { Err(Fault::invalid("test", "failing", "whole", "none")) }
    });
    assert_eq!(failed.unwrap_err().field, "test");
    target.upload();
    let fresh = Trained::after(&spec(3, 1), 1, 0);
    assert_eq!(target.state_hash(), fresh.state_hash());
    assert!(target.image(Version(0)).unwrap() == fresh.image(Version(0)).unwrap());
}

#[test]
fn a_newer_format_is_refused_as_such() {
    let fixture = fixture();
    craft(&fixture, |manifest| manifest.format_version = 2);
    let fault = fixture.target.restore(&fixture.store, "good").unwrap_err();
    assert_eq!(fault.kind, FaultKind::Precondition, "{fault}");
    assert!(fault.value.contains("format_version 2"), "{fault}");
}

/// Weights uploaded after a failed restore have no older image, even if the restore had put one on the drives. With few
/// buffers, shards go to the drives before they are whole.
#[test]
fn a_failed_restore_leaves_nothing_on_the_drives() {
    for spill in [Spill::State, Spill::All] {
        let dir = tempfile::tempdir().unwrap();
        let dirs = vec![dir.path().to_path_buf()];
        let storage = Storage { dirs, spill, buffers: 2, ..Storage::default() };
        let nvme = JobSpec { tier: TierKind::Nvme, ..spec(1, 1) };
        let fixture = Fixture { target: Trained::open_on(&nvme, 1, &storage), ..fixture() };
        let damage = |bytes: &mut Vec<u8>| {
            let at = bytes.len() / 4 * 3;
            bytes[at] ^= 1;
        };
        fixture.fault_with(PART, damage).unwrap();
        fixture.target.upload();
        let image = fixture.target.image(Version(0)).unwrap();
        assert_eq!(image, Trained::after(&spec(1, 1), 1, 0).image(Version(0)).unwrap());
        drop(fixture);
        let again = Trained::open_on(&nvme, 1, &storage);
        assert_eq!((again.version(), again.image(Version(0)).unwrap()), (Version(0), image));
    }
}

/// Writes a manifest with other contents and the right digest, as a forged checkpoint could have.
fn craft(fixture: &Fixture, change: impl FnOnce(&mut Manifest)) {
    let path = fixture.path("manifest.json");
    let mut manifest: Manifest = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut manifest);
    // The digest is taken while zeros stand for its own digits.
    manifest.blake3 = "0".repeat(64);
    let blank = serde_json::to_string_pretty(&manifest).unwrap() + "\n";
    let digest = blake3::hash(blank.as_bytes()).to_hex();
    fs::write(path, blank.replacen(&manifest.blake3, &digest, 1)).unwrap();
}

#[test]
fn a_crafted_checkpoint_reads_no_other_folder_and_takes_no_memory_by_its_word() {
    let elsewhere = fixture();
    craft(&elsewhere, |manifest| manifest.parts[1].file = format!("../good/{PART}"));
    let fault = elsewhere.target.restore(&elsewhere.store, "good").unwrap_err();
    assert!(fault.kind == FaultKind::Corrupt && fault.value.contains("../good"), "{fault}");

    // The header of a sparse file claims a table of 8 TiB, as large a file as file systems take.
    let sparse = fixture();
    let path = sparse.path(PART);
    let good = fs::read(&path).unwrap();
    let length = u64::from_le_bytes(good[..8].try_into().unwrap()) as usize;
    let mut header: serde_json::Value = serde_json::from_slice(&good[8..8 + length]).unwrap();
    let data = 1u64 << 43;
    let mut table = header["hashes.state"].take();
    (table["data_offsets"], table["shape"]) =
        (serde_json::json!([0, data]), serde_json::json!([data / 32, 32]));
    let header = serde_json::json!({"hashes.state": table});
    let header = serde_json::to_vec(&header).unwrap();
    let bytes = [&(header.len() as u64).to_le_bytes()[..], &header].concat();
    fs::write(&path, &bytes).unwrap();
    let whole = bytes.len() as u64 + data;
    fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(whole).unwrap();
    craft(&sparse, |manifest| {
        manifest.parts[1].header = blake3::hash(&bytes).to_hex().to_string();
        manifest.parts[1].bytes = whole;
    });
    let fault = sparse.target.restore(&sparse.store, "good").unwrap_err();
    assert!(fault.kind == FaultKind::Corrupt && fault.limit.contains("one row for each block"), "{fault}");
}
