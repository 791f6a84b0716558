//! A restore returns the written bytes, whatever the servers and shards.

use longshore_engine::{job::StoredImages, tier::Spill};
use longshore_proto::{Formats, MasterFormat, StateFormat};
use safetensors::SafeTensors;

use super::*;

#[test]
fn any_servers_and_shard_sizes_give_the_same_state() {
    let (_root, store) = store();
    for (index, (from, from_blocks, to, to_blocks)) in
        [(1, 2, 1, 2), (3, 1, 2, 1), (2, 1, 3, 1), (2, 2, 3, 1), (3, 1, 2, 3), (1, 5, 3, 2)]
            .into_iter()
            .enumerate()
    {
        let name = format!("c{index}");
        let saved = Trained::after(&spec(from_blocks, 0), from, 2);
        saved.save(&store, &name);
        let restored = Trained::open(&spec(to_blocks, 0), to);
        let infos = restored.restore(&store, &name).unwrap();
        assert_eq!(infos[0].state_hash.as_deref(), Some(&*saved.state_hash()), "{from} to {to}");
        assert_eq!(restored.state_hash(), saved.state_hash(), "{from} to {to}");
        assert_eq!(restored.image(Version(2)).unwrap(), saved.image(Version(2)).unwrap());
        // The restored job is saved again, also by servers that own no shard.
        restored.save(&store, &format!("{name}-again"));
        let again = Trained::open(&spec(from_blocks, 0), from);
        let info = again.restore(&store, &format!("{name}-again")).unwrap().remove(0);
        assert_eq!(info.state_hash, Some(again.state_hash()));
        assert_eq!(again.state_hash(), saved.state_hash(), "{from} to {to} and back");
        saved.step(3);
        restored.step(3);
        saved.step(4);
        restored.step(4);
        assert_eq!(restored.state_hash(), saved.state_hash(), "{from} to {to}, two steps on");
    }
}

#[test]
fn every_rule_and_image_dtype_returns() {
    let (_root, store) = store();
    for rule in Rule::ALL {
        for (image_dtype, max_delay) in [(Dtype::F32, 1), (Dtype::F16, 0)] {
            let spec = JobSpec { rule, image_dtype, ..spec(2, max_delay) };
            let name = format!("{rule}-{image_dtype}");
            let saved = Trained::after(&spec, 2, 2);
            saved.save(&store, &name);
            let restored = Trained::open(&spec, 1);
            restored.restore(&store, &name).unwrap();
            assert_eq!(restored.state_hash(), saved.state_hash(), "{name}");
        }
    }
}

/// Each parameter's count of missed steps returns with the checkpoint's last commit.
#[test]
fn parameters_that_steps_left_out_go_on_with_their_own_counts() {
    let (_root, store) = store();
    for max_delay in [0, 1] {
        let spec = |blocks| JobSpec { leave_out: true, ..spec(blocks, max_delay) };
        let name = format!("left-out-{max_delay}");
        let saved = Trained::after(&spec(2), 2, 4);
        saved.save(&store, &name);
        let restored = Trained::open(&spec(1), 3);
        let info = restored.restore(&store, &name).unwrap().remove(0);
        assert_eq!(info.commit.unwrap().left_out, left_out(4));
        let plain = Trained::open(&JobSpec { leave_out: false, ..spec(1) }, 1);
        plain.restore(&store, &name).unwrap();
        assert_eq!(plain.state_hash(), saved.state_hash());
        for step in 5..=9 {
            saved.step(step);
            restored.step(step);
            assert_eq!(restored.state_hash(), saved.state_hash(), "{name}, step {step}");
            let version = Version(step);
            assert_eq!(
                restored.image(version).unwrap(),
                saved.image(version).unwrap(),
                "{name}, step {step}"
            );
        }
    }
}

/// A restore moves state and images from memory to drives that keep both, and back to memory.
#[test]
fn images_on_drives_are_saved_and_restored() {
    let (_root, store) = store();
    for (max_delay, kept) in [(0, [5, 5]), (1, [4, 5])] {
        let dir = tempfile::tempdir().unwrap();
        let dirs = vec![dir.path().to_path_buf()];
        let storage = Storage { dirs, spill: Spill::All, buffers: 2, ..Storage::default() };
        let same = |ours: &Trained, theirs: &Trained, versions: [u64; 2]| {
            assert_eq!(ours.state_hash(), theirs.state_hash());
            for version in versions.map(Version) {
                assert_eq!(ours.image(version).unwrap(), theirs.image(version).unwrap(), "{version}");
            }
        };
        let memory = Trained::after(&spec(2, max_delay), 2, 2);
        memory.save(&store, &format!("from-memory-{max_delay}"));
        let nvme = JobSpec { tier: TierKind::Nvme, ..spec(1, max_delay) };
        let drives = Trained::open_on(&nvme, 1, &storage);
        drives.restore(&store, &format!("from-memory-{max_delay}")).unwrap();
        same(&drives, &memory, kept.map(|version| version - 3));
        for step in 3..=5 {
            memory.step(step);
            drives.step(step);
        }
        same(&drives, &memory, [4, 5]);
        drives.save(&store, &format!("from-drives-{max_delay}"));
        let back = Trained::open(&spec(2, max_delay), 3);
        back.restore(&store, &format!("from-drives-{max_delay}")).unwrap();
        same(&back, &memory, kept);
    }
}

#[test]
fn state_in_fewer_bits_goes_on_undisturbed() {
    let (_root, store) = store();
    for (index, formats) in low_formats().into_iter().enumerate() {
        for (max_delay, from, to) in [(0, 3, 2), (1, 1, 3)] {
            let spec = |blocks| JobSpec { formats, ..spec(blocks, max_delay) };
            let name = format!("c{index}-{max_delay}");
            let saved = Trained::after(&spec(1), from, 2);
            saved.save(&store, &name);
            let restored = Trained::open(&spec(2), to);
            let infos = restored.restore(&store, &name).unwrap();
            assert_eq!(infos[0].state_hash.as_deref(), Some(&*saved.state_hash()), "{formats:?}");
            for step in 3..=5 {
                saved.step(step);
                restored.step(step);
            }
            assert_eq!(restored.state_hash(), saved.state_hash(), "{formats:?}");
            assert_eq!(restored.image(Version(5)).unwrap(), saved.image(Version(5)).unwrap());
        }
    }
}

fn low_formats() -> [Formats; 4] {
    let formats = |state, master| Formats { state, master, seed: 7 };
    [
        formats(StateFormat::Bf16, MasterFormat::F32),
        formats(StateFormat::Block8, MasterFormat::F32),
        formats(StateFormat::F32, MasterFormat::Bf16),
        formats(StateFormat::Block8, MasterFormat::Bf16),
    ]
}

#[test]
fn the_last_commit_returns_even_after_an_overflow() {
    let (_root, store) = store();
    let saved = Trained::after(&spec(2, 0), 1, 3);
    saved.save(&store, "overflow");
    let restored = Trained::open(&spec(2, 0), 1);
    let info = restored.restore(&store, "overflow").unwrap().remove(0);
    assert_eq!((info.version, info.applied), (Version(3), 2));
    let commit = restored.jobs[0].progress().last_commit.unwrap();
    assert!(commit.skip && commit.norm.is_nan());
    assert_eq!(commit.loss_scale.to_bits(), (1.0f64 / 3.0).to_bits());
    assert_eq!(commit.trainer_state, b"after 3");
}

#[test]
fn a_delayed_job_keeps_both_images() {
    let (_root, store) = store();
    let saved = Trained::after(&spec(1, 1), 3, 5);
    saved.save(&store, "delayed");
    let restored = Trained::open(&spec(2, 1), 3);
    let info = restored.restore(&store, "delayed").unwrap().remove(0);
    assert_eq!(info.images, StoredImages::Both);
    for version in [Version(4), Version(5)] {
        assert_eq!(restored.image(version).unwrap(), saved.image(version).unwrap());
    }
    restored.save(&store, "again");
    let again = Trained::open(&spec(1, 1), 1);
    assert_eq!(again.restore(&store, "again").unwrap()[0].images, StoredImages::Both);
    assert_eq!(again.image(Version(4)).unwrap(), saved.image(Version(4)).unwrap());
    let exact = Trained::open(&spec(2, 0), 2);
    exact.restore(&store, "delayed").unwrap();
    assert_ne!(exact.image(Version(5)).unwrap(), saved.image(Version(5)).unwrap(), "c should matter here");
    saved.step(6);
    restored.step(6);
    assert_eq!(restored.image(Version(6)).unwrap(), saved.image(Version(6)).unwrap());
    assert_eq!(restored.state_hash(), saved.state_hash());
}

#[test]
fn without_an_older_image_there_is_none() {
    let (_root, store) = store();
    Trained::after(&spec(2, 1), 2, 0).save(&store, "start");
    let start = Trained::open(&spec(2, 1), 1);
    assert_eq!(start.restore(&store, "start").unwrap()[0].images, StoredImages::Current);

    let exact = Trained::after(&spec(2, 0), 1, 4);
    exact.save(&store, "exact");
    let delayed = Trained::open(&spec(2, 1), 1);
    assert_eq!(delayed.restore(&store, "exact").unwrap()[0].images, StoredImages::None);
    assert_eq!(delayed.image(Version(4)).unwrap(), exact.image(Version(4)).unwrap());
    assert!(delayed.image(Version(3)).is_err());
    // Saved again before its first step, the restored job still has no older image.
    delayed.save(&store, "again");
    let again = Trained::open(&spec(1, 1), 2);
    assert_eq!(again.restore(&store, "again").unwrap()[0].images, StoredImages::Current);
    assert_eq!(again.state_hash(), exact.state_hash());
}

#[test]
fn a_part_is_a_safetensors_file() {
    let (root, store) = store();
    let saved = Trained::after(&spec(2, 1), 2, 2);
    saved.save(&store, "open");
    let folder = root.path().join("run/open");
    assert_eq!(
        files(&folder),
        ["manifest.json", "server-00001-of-00002.safetensors", "server-00002-of-00002.safetensors"]
    );
    let bytes = std::fs::read(folder.join("server-00002-of-00002.safetensors")).unwrap();
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    let metadata = header.metadata().clone().unwrap();
    let wanted = [
        ("format", "longshore-checkpoint"),
        ("version", "2"),
        ("job", "run"),
        ("server", "2"),
        ("servers", "2"),
    ];
    wanted.into_iter().for_each(|(key, value)| assert_eq!(metadata[key], value));
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    for (name, elements) in [("master", 2), ("first", 2), ("second", 2), ("image", 2), ("older_image", 2)] {
        let tensor = tensors.tensor(&format!("shard.000001.{name}")).unwrap();
        assert_eq!(tensor.shape(), [elements * BLOCK_ELEMENTS as usize]);
    }
    let range = 2 * 2 * BLOCK_ELEMENTS as usize..2 * 4 * BLOCK_ELEMENTS as usize;
    let image = tensors.tensor("shard.000001.image").unwrap();
    assert_eq!(image.data(), &saved.image(Version(2)).unwrap()[range]);
}
