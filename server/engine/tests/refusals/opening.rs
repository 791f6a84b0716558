//! Jobs that a server must not open: names, specs, placements and budgets.

use std::cmp::Reverse;

use longshore_engine::{
    admission::{Budget, Need},
    job::{Job, room},
    kernels::Isa,
    tier::{Spill, Storage},
};
use longshore_proto::{
    Dtype, Epoch, Fault, FaultKind, Formats, JobName, JobSpec, MasterFormat, Param, Partition, Placement,
    Rank, Rule, ServerId, ShardId, StateFormat, TierKind,
};

use super::{
    Expected, check,
    common::{
        BLOCK,
        cluster::{compute, placement},
    },
    small,
};

use FaultKind::{Conflict, Exhausted, Invalid};

fn open(spec: &JobSpec, placement: Placement, server: u32, budget: &Budget) -> Result<Job, Fault> {
    Job::open(
        spec.clone(),
        placement,
        ServerId(server),
        budget,
        &Storage::default(),
        compute(1, Isa::detect()),
        Box::new(|| {}),
    )
}

#[test]
fn names_are_safe_file_names() {
    for good in ["a", "gpt2-small_v1.3", &"x".repeat(128)] {
        assert_eq!(JobName::parse("spec.name", good).unwrap().as_str(), good);
    }
    for bad in ["", ".", "..", ".hidden", "a/b", "a\\b", "a b", "ä", "a\0", "a\n", "~", &"x".repeat(129)] {
        let fault = JobName::parse("spec.name", bad).unwrap_err();
        check(&fault, (Invalid, "spec.name", &["1 to 128 of A-Z", "choose another name"]));
        let quoted =
            if bad.len() < 20 { format!("{bad:?}") } else { format!("{:?}... (129 bytes)", &bad[..16]) };
        assert_eq!(fault.value, quoted);
    }
}

type Change = fn(&mut JobSpec);

/// Returns partitions, each from its first parameter and its contributors.
fn cut(partitions: &[(u32, &[u32])]) -> Vec<Partition> {
    let partition = |&(first, ranks): &(u32, &[u32])| Partition {
        first,
        ranks: ranks.iter().map(|&rank| Rank(rank)).collect(),
    };
    partitions.iter().map(partition).collect()
}

const BAD_SPECS: &[(Change, Expected)] = &[
    (|s| s.world_size = 0, (Invalid, "spec.world_size", &["is 0", "in 1..=4096"])),
    (|s| s.world_size = 4097, (Invalid, "spec.world_size", &["is 4097"])),
    (|s| s.micro_steps = 0, (Invalid, "spec.micro_steps", &["in 1..=65536"])),
    (|s| s.max_delay = 2, (Invalid, "spec.max_delay", &["is 2", "in 0..=1"])),
    (|s| s.groups.clear(), (Invalid, "spec.groups", &["is 0", "in 1..=1024"])),
    (|s| s.shard_elements = 0, (Invalid, "spec.shard_elements", &["is 0"])),
    (
        |s| s.shard_elements += 1,
        (Invalid, "spec.shard_elements", &["327681", "multiple of the block, 65536", "round it up"]),
    ),
    (|s| s.shard_elements = u64::MAX, (Invalid, "spec.shard_elements", &["in 65536..=1073741824"])),
    (|s| s.params.clear(), (Invalid, "spec.params", &["is 0", "send the model's parameters"])),
    (|s| s.params[1].name = String::new(), (Invalid, "spec.params[1].name", &["1 to 512 bytes"])),
    (
        |s| s.params[1].name = "layer.0".into(),
        (Invalid, "spec.params[1].name", &["layer.0", "unique", "used twice"]),
    ),
    (
        |s| s.params[0].shape = vec![1; 9],
        (Invalid, "spec.params[0].shape", &["is 9", "at most 8 dimensions"]),
    ),
    (
        |s| s.params[0].shape = vec![3, 0],
        (Invalid, "spec.params[0].shape", &["[3, 0]", "leave empty tensors out"]),
    ),
    (|s| s.params[0].shape = vec![u64::MAX, 3], (Invalid, "spec.params[0].shape", &["1 to 17592186044416"])),
    (|s| s.params[0].shape = vec![1 << 44], (Invalid, "spec.params", &["at most 17592186044416 elements"])),
    (|s| s.params[1].group = 2, (Invalid, "spec.params[1].group", &["is 2"])),
    (|s| s.partitions = cut(&[(1, &[0, 1])]), (Invalid, "spec.partitions[0].first", &["is 1", "must be 0"])),
    (
        |s| s.partitions = cut(&[(0, &[0, 1]), (0, &[0])]),
        (Invalid, "spec.partitions[1].first", &["is 0", "in 1..2", "in the order of their parameters"]),
    ),
    (
        |s| s.partitions = cut(&[(0, &[0, 1]), (2, &[0])]),
        (Invalid, "spec.partitions[1].first", &["is 2", "in 1..2"]),
    ),
    (
        |s| s.partitions = cut(&[(0, &[]), (1, &[])]),
        (Invalid, "spec.partitions", &["all of them frozen", "at least one that is trained"]),
    ),
    (
        |s| s.partitions = cut(&[(0, &[1, 0])]),
        (Invalid, "spec.partitions[0].ranks", &["[1, 0]", "ascending"]),
    ),
    (|s| s.partitions = cut(&[(0, &[0, 0])]), (Invalid, "spec.partitions[0].ranks", &["[0, 0]", "once"])),
    (|s| s.partitions = cut(&[(0, &[0, 2])]), (Invalid, "spec.partitions[0].ranks", &["[0, 2]"])),
    (
        |s| s.partitions = cut(&[(0, &[1]), (1, &[1])]),
        (Invalid, "spec.partitions", &["rank 0 in none of them", "give each rank a partition"]),
    ),
    (|s| s.tier = TierKind::Nvme, (FaultKind::Precondition, "state_dir", &["not set", "--state-dir"])),
];

#[test]
fn bad_specs_are_refused_and_reserve_nothing() {
    let budget = Budget::new(1 << 32);
    for (change, expected) in BAD_SPECS {
        let placement = placement(&small(), 2);
        let mut spec = small();
        change(&mut spec);
        check(&open(&spec, placement, 0, &budget).err().unwrap(), *expected);
        assert_eq!(budget.reserved(), 0);
    }
}

const OTHER_SPECS: &[(Change, &str)] = &[
    (|s| s.name = JobName::parse("name", "other").unwrap(), "spec.name"),
    (|s| s.params[1].shape = vec![5], "spec.params[1]"),
    (|s| s.params[0].name = "renamed".into(), "spec.params[0]"),
    (|s| s.params[0].group = 1, "spec.params[0]"),
    (|s| s.params.push(Param { name: "more".into(), shape: vec![], group: 0 }), "spec.params"),
    (|s| s.params.truncate(1), "spec.params"),
    (|s| s.groups[0] = "renamed".into(), "spec.groups"),
    (|s| s.rule = Rule::Lion, "spec.rule"),
    (|s| s.gradient_dtype = Dtype::F16, "spec.gradient_dtype"),
    (|s| s.image_dtype = Dtype::F16, "spec.image_dtype"),
    (|s| s.micro_steps = 3, "spec.micro_steps"),
    (|s| s.max_delay = 1, "spec.max_delay"),
    (|s| s.shard_elements *= 2, "spec.shard_elements"),
    (|s| s.tier = TierKind::Shm, "spec.tier"),
    (|s| s.formats.state = StateFormat::Bf16, "spec.state_format"),
    (|s| s.formats.master = MasterFormat::Bf16, "spec.master_format"),
    (|s| s.formats.seed = 1, "spec.rounding_seed"),
];

#[test]
fn a_second_open_must_be_of_the_same_job() {
    assert_eq!(small().same_as(&small()), Ok(()));
    let of_ranks = |world_size| JobSpec { world_size, ..small() };
    assert_eq!(small().same_as(&of_ranks(1)), Ok(()), "fewer ranks train");
    let fault = small().same_as(&of_ranks(3)).unwrap_err();
    check(&fault, (Conflict, "spec.world_size", &["at most 2", "start fewer ranks"]));
    let apart = |world_size| JobSpec {
        partitions: vec![
            Partition { first: 0, ranks: vec![Rank(0)] },
            Partition { first: 1, ranks: vec![Rank(world_size - 1)] },
        ],
        ..of_ranks(world_size)
    };
    let fault = apart(2).same_as(&apart(1)).unwrap_err();
    check(&fault, (Conflict, "spec.world_size", &["2, as the job was opened"]));
    for (change, field) in OTHER_SPECS {
        let mut other = small();
        change(&mut other);
        let fault = small().same_as(&other).unwrap_err();
        check(&fault, (Conflict, field, &["as the job was opened", "delete the job"]));
    }
}

#[test]
fn placements_name_each_shards_owner() {
    let spec = small();
    let good = placement(&spec, 2);
    let budget = Budget::new(1 << 32);
    let refused = |change: fn(&mut Placement), server, expected| {
        let mut placement = good.clone();
        change(&mut placement);
        check(&open(&spec, placement, server, &budget).err().unwrap(), expected);
        assert_eq!(budget.reserved(), 0);
    };
    refused(|p| p.servers.clear(), 0, (Invalid, "placement.servers", &["is 0", "in 1..=4096"]));
    refused(
        |p| p.owners.truncate(2),
        0,
        (Invalid, "placement.owners", &["is 2", "3, the layout's number of shards"]),
    );
    refused(|p| p.owners[1] = ServerId(2), 0, (Invalid, "placement.owners[1]", &["is 2", "below 2"]));
    refused(|_| (), 2, (Invalid, "server", &["is 2", "below 2, the number of servers"]));
    let mut moved = good.clone();
    moved.servers[1] = "elsewhere:7070".into();
    moved.epoch = Epoch(2);
    assert_eq!(good.same_owners(&moved), Ok(()));
    moved.owners.swap(0, 1);
    let fault = good.same_owners(&moved).unwrap_err();
    check(&fault, (Conflict, "placement.owners", &["as the job was opened, over 2 servers", "same servers"]));
}

/// The need of 7 blocks of 65536 elements is computed by hand. An element has 12 bytes of AdamW state and 4 of two bf16
/// images. Contributions of two ranks and sums in fp32 take 8 and 4 bytes. Each rank has two connections of 7 MiB.
#[test]
fn a_job_that_does_not_fit_is_refused_with_the_shortage() {
    let spec = small();
    let elements = 7 * BLOCK as u64;
    let transfers = 2 * 2 * (7 << 20);
    let bytes = elements * (12 + 4 + 8 + 4) + transfers;
    let layout = spec.validate().unwrap();
    let owned = placement(&spec, 2).owned(ServerId(0));
    assert_eq!(Need::of(&spec, &layout, &owned, &Storage::default()).total(), bytes);

    let budget = Budget::new(bytes + 1000);
    let job = open(&spec, placement(&spec, 2), 0, &budget).unwrap();
    assert_eq!((job.memory_bytes(), budget.reserved()), (bytes, bytes));
    let fault = open(&spec, placement(&spec, 2), 0, &budget).err().unwrap();
    check(&fault, (Exhausted, "memory", &["at most 1000", "raise --memory", "delete another job"]));
    for number in [bytes, transfers, elements * 12, elements * 4, elements * 8, bytes + 1000, bytes - 1000] {
        assert!(fault.to_string().contains(&number.to_string()), "no {number} in: {fault}");
    }
    assert_eq!(budget.reserved(), bytes);
    drop(job);
    assert_eq!(budget.reserved(), 0);
    assert!(open(&spec, placement(&spec, 2), 0, &Budget::new(bytes - 1)).is_err());
    assert!(open(&spec, placement(&spec, 2), 0, &Budget::new(bytes)).is_ok());
}

/// Room is counted in shards of the largest size, so that any other shards fit too.
#[test]
fn a_server_has_room_for_the_shards_that_it_can_then_reserve() {
    let (spec, storage) = (small(), Storage::default());
    let (layout, placement) = (spec.validate().unwrap(), placement(&spec, 2));
    let need = |shards: &[ShardId]| Need::of(&spec, &layout, shards, &storage).total();
    let base = need(&[]);
    let mut largest: Vec<u64> = (0..layout.shards()).map(|shard| need(&[ShardId(shard)]) - base).collect();
    largest.sort_by_key(|&bytes| Reverse(bytes));
    let (held, elsewhere) = (placement.owned(ServerId(0)), placement.owned(ServerId(1)));
    for count in 0..=elsewhere.len() {
        let bytes = largest[..count].iter().sum::<u64>();
        for more in [0, largest[count] - 1] {
            assert_eq!(room(&spec, &layout, &storage, base + bytes + more), count);
            let budget = Budget::new(need(&held) + bytes + more);
            let job = open(&spec, placement.clone(), 0, &budget).unwrap();
            assert_eq!(job.room(&storage), count);
            job.make_room(&[&held, &elsewhere[..count]].concat(), |_, _| Ok(())).unwrap();
            // Room made for shards that never came does not count in the next plan.
            assert_eq!(job.room(&storage), count);
        }
    }
    assert_eq!(room(&spec, &layout, &storage, base - 1), 0);
}

/// Shards that move one by one need as much memory as the shards of an opened job.
#[test]
fn shards_one_by_one_take_what_they_take_together_in_every_tier() {
    let dirs = vec!["a".into(), "b".into()];
    for (tier, spill, max_delay) in [
        (TierKind::Memory, Spill::State, 0),
        (TierKind::Shm, Spill::State, 1),
        (TierKind::Nvme, Spill::State, 0),
        (TierKind::Nvme, Spill::State, 1),
        (TierKind::Nvme, Spill::All, 0),
    ] {
        let formats = Formats { state: StateFormat::Block8, master: MasterFormat::Bf16, seed: 0 };
        let partitions = vec![Partition::whole(2), Partition::frozen(1)];
        let spec = JobSpec { tier, max_delay, formats, partitions, ..small() };
        let layout = spec.validate().unwrap();
        let storage = Storage { spill, dirs: dirs.clone(), ..Storage::default() };
        let all: Vec<ShardId> = (0..layout.shards()).map(ShardId).collect();
        assert!(all.iter().any(|&shard| layout.is_frozen(shard)));
        let [none, whole] = [&[][..], &all].map(|shards| Need::of(&spec, &layout, shards, &storage));
        let parts = all.iter().map(|&shard| Need::of_shard(&spec, &layout, shard, storage.spills(&spec)));
        let sums = parts.fold([0; 5], |[state, images, contributions, sums, disk], of| {
            let accumulators = sums + of.accumulators;
            let gradients = contributions + of.contributions;
            [state + of.state, images + of.images, gradients, accumulators, disk + of.disk]
        });
        let of = |need: &Need| [need.state, need.images, need.contributions, need.accumulators, need.disk];
        let expected: Vec<u64> = of(&whole).iter().zip(of(&none)).map(|(whole, none)| whole - none).collect();
        assert_eq!(sums.to_vec(), expected, "{tier:?} {spill:?} {max_delay}");
    }
}

/// With time in the square of the number of shards, the call would take minutes for 2^16 shards.
#[test]
fn room_for_many_shards_is_reckoned_shard_by_shard() {
    let params = vec![Param { name: "all".into(), shape: vec![(BLOCK as u64) << 16], group: 0 }];
    for tier in [TierKind::Shm, TierKind::Nvme] {
        let spec =
            JobSpec { tier, shard_elements: BLOCK as u64, ..JobSpec::new(small().name, params.clone()) };
        let (layout, storage) =
            (spec.validate().unwrap(), Storage { spill: Spill::All, ..Storage::default() });
        room(&spec, &layout, &storage, 1 << 40);
    }
}

/// The need is computed by hand. In place of 12 bytes of fp32 state, bf16 takes three times 2 bytes. With 8-bit moments
/// an element takes 2, 1 and 1 bytes. Each moment also has a scale of 4 bytes for each 256 elements. The allocated
/// slabs must have the same size.
#[test]
fn state_in_fewer_bits_needs_fewer_bytes() {
    let elements = 7 * BLOCK as u64;
    let need = |state, master| {
        let spec = JobSpec { formats: Formats { state, master, seed: 0 }, ..small() };
        let layout = spec.validate().unwrap();
        let owned = placement(&spec, 2).owned(ServerId(0));
        let need = Need::of(&spec, &layout, &owned, &Storage::default());
        let budget = Budget::new(need.total());
        let job = open(&spec, placement(&spec, 2), 0, &budget).unwrap();
        assert_eq!(job.memory_bytes(), need.total());
        need.state
    };
    assert_eq!(need(StateFormat::F32, MasterFormat::F32), elements * 12);
    assert_eq!(need(StateFormat::Bf16, MasterFormat::Bf16), elements * 6);
    assert_eq!(need(StateFormat::Bf16, MasterFormat::F32), elements * 8);
    assert_eq!(need(StateFormat::Block8, MasterFormat::Bf16), elements * 4 + 2 * elements / 64);
}
