//! Frozen parameters in checkpoints: their weights return bit for bit. A job that trains other parameters than the
//! checkpoint's job is refused.

use longshore_engine::{admission::Need, tier::Spill};
use longshore_proto::Partition;

use super::*;

/// The model of [`super::spec`] with two blocks that are trained, and four that are frozen.
fn frozen(shard_blocks: u64, max_delay: u32) -> JobSpec {
    let partitions = vec![Partition::whole(1), Partition::frozen(2)];
    JobSpec { partitions, ..spec(shard_blocks, max_delay) }
}

#[test]
fn frozen_weights_return_on_any_servers_and_tier() {
    let (_root, store) = store();
    let dir = tempfile::tempdir().unwrap();
    let dirs = vec![dir.path().to_path_buf()];
    // In shards of two blocks, one server of three has all trained shards. The other servers have only frozen shards.
    for (index, (from, from_blocks, to, to_blocks, max_delay, spill)) in [
        (1, 2, 3, 2, 0, None),
        (3, 2, 1, 1, 0, None),
        (3, 2, 2, 2, 1, None),
        (2, 1, 3, 2, 1, Some(Spill::State)),
        (3, 2, 2, 1, 1, Some(Spill::All)),
        (2, 2, 3, 1, 0, Some(Spill::All)),
    ]
    .into_iter()
    .enumerate()
    {
        let name = format!("c{index}");
        let saved = Trained::after(&frozen(from_blocks, max_delay), from, 2);
        let given = saved.image(Version(2)).unwrap();
        saved.save(&store, &name);
        let (tier, storage) = match spill {
            None => (TierKind::Memory, Storage::default()),
            Some(spill) => {
                (TierKind::Nvme, Storage { dirs: dirs.clone(), spill, buffers: 2, ..Storage::default() })
            }
        };
        let job = JobName::parse("name", &format!("run{index}")).unwrap();
        let restored =
            Trained::open_on(&JobSpec { tier, name: job, ..frozen(to_blocks, max_delay) }, to, &storage);
        let infos = restored.restore(&store, &name).unwrap();
        assert_eq!(infos[0].state_hash.as_deref(), Some(&*saved.state_hash()), "{name}");
        assert_eq!(restored.state_hash(), saved.state_hash(), "{name}");
        assert_eq!(restored.image(Version(2)).unwrap(), given, "{name}");
        for step in 3..=5 {
            saved.step(step);
            restored.step(step);
        }
        assert_eq!(restored.state_hash(), saved.state_hash(), "{name}, three steps on");
        let image = restored.image(Version(5)).unwrap();
        assert_eq!(image, saved.image(Version(5)).unwrap(), "{name}, three steps on");
        let start = saved.layout.param_range(2).start as usize * 2;
        assert!(image[start..] == given[start..] && image[..start] != given[..start], "{name}");
    }
}

#[test]
fn other_frozen_parameters_are_refused() {
    let (_root, store) = store();
    Trained::after(&frozen(2, 0), 2, 2).save(&store, "some");
    let thawed = JobSpec {
        partitions: vec![Partition::whole(1), Partition { first: 2, ranks: vec![Rank(0)] }],
        ..spec(2, 0)
    };
    let wider = JobSpec { image_dtype: Dtype::F32, ..frozen(2, 0) };
    for (spec, field) in
        [(spec(2, 0), "spec.partitions"), (thawed, "spec.partitions"), (wider, "spec.image_dtype")]
    {
        let fault = Trained::open(&spec, 1).restore(&store, "some").unwrap_err();
        assert_eq!((fault.kind, &*fault.field), (FaultKind::Conflict, field), "{fault}");
        assert!(fault.to_string().contains("frozen"), "{fault}");
    }
    // A parameter that the checkpoint's job trains may not be frozen in the new job.
    Trained::after(&spec(2, 0), 2, 2).save(&store, "all");
    let fault = Trained::open(&frozen(2, 0), 1).restore(&store, "all").unwrap_err();
    assert_eq!(fault.field, "spec.partitions", "{fault}");
}

/// A frozen element takes two bytes of memory as state, and none for gradients and images.
#[test]
fn frozen_elements_take_two_bytes() {
    let need = |spec: &JobSpec| {
        let layout = spec.validate().unwrap();
        let owned: Vec<_> = (0..layout.shards()).map(ShardId).collect();
        Need::of(spec, &layout, &owned, &Storage::default())
    };
    let spec = frozen(2, 0);
    let trained = JobSpec { params: spec.params[..2].to_vec(), partitions: Vec::new(), ..spec.clone() };
    let (with, without) = (need(&spec), need(&trained));
    assert_eq!(with.state - without.state, 2 * 4 * BLOCK_ELEMENTS);
    assert_eq!(with.images, without.images);
    assert_eq!((with.contributions, with.accumulators), (without.contributions, without.accumulators));
}
