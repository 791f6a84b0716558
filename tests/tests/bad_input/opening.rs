//! Jobs that cannot be opened: a different spec, an impossible spec, a spec that does not fit.

use longshore_proto::{
    Dtype,
    FaultKind::{Conflict, Exhausted, Invalid},
    Formats, JobSpec, MasterFormat, Param, Rule, StateFormat, TierKind,
};
use longshore_tests::conformance::{
    cluster::Cluster,
    raw::{assert_fault, placement},
};
use longshore_wire::{Wire, v1};

use super::{BEFORE, Victim};

#[test]
fn another_spec_under_the_same_name_is_refused_with_the_field() {
    let cluster = Cluster::start(2);
    let victim = Victim::start(&cluster, "opened-twice");
    let spec = || victim.spec.clone();
    let in_formats = |state, master| JobSpec { formats: Formats { state, master, seed: 0 }, ..spec() };
    let mut renamed = spec();
    renamed.params[1].name = "other".into();
    let others = [
        ("spec.params[1]", "other [7] in group 1", renamed),
        ("spec.params", "4", JobSpec { params: spec().params[..4].to_vec(), ..spec() }),
        ("spec.groups", "lone", JobSpec { groups: vec!["lone".into()], ..spec() }),
        ("spec.rule", "lion", JobSpec { rule: Rule::Lion, ..spec() }),
        ("spec.gradient_dtype", "f16", JobSpec { gradient_dtype: Dtype::F16, ..spec() }),
        ("spec.image_dtype", "f32", JobSpec { image_dtype: Dtype::F32, ..spec() }),
        ("spec.world_size", "2", JobSpec { world_size: 2, ..spec() }),
        ("spec.micro_steps", "3", JobSpec { micro_steps: 3, ..spec() }),
        ("spec.max_delay", "1", JobSpec { max_delay: 1, ..spec() }),
        ("spec.shard_elements", "131072", JobSpec { shard_elements: 131072, ..spec() }),
        ("spec.tier", "shm", JobSpec { tier: TierKind::Shm, ..spec() }),
        ("spec.state_format", "block8", in_formats(StateFormat::Block8, MasterFormat::F32)),
        ("spec.master_format", "bf16", in_formats(StateFormat::F32, MasterFormat::Bf16)),
    ];
    let placement = placement(&cluster.addresses(), &victim.layout);
    for (field, value, other) in others {
        let found = victim.servers[0].open(other.to_wire(), &placement, 0);
        assert_fault(found, Conflict, field, value, "as the job was opened");
    }
    let found = victim.servers[0].open(spec().to_wire(), &placement, 1);
    assert_fault(found, Conflict, "server", "1", "0");
    let mut swapped = placement.clone();
    swapped.owners.reverse();
    swapped.owners[0] = swapped.owners[1];
    let found = victim.servers[0].open(spec().to_wire(), &swapped, 0);
    assert_fault(found, Conflict, "placement.owners", "shard 1 on server 0", "as the job was opened");
    let again = victim.servers[0].open(spec().to_wire(), &placement, 0).expect("the same spec");
    assert!(!again.created && again.progress.is_some_and(|progress| progress.version == BEFORE));
    victim.finish();
}

#[test]
fn a_spec_that_cannot_be_is_refused_before_anything_is_allocated() {
    let cluster = Cluster::start(2);
    let victim = Victim::start(&cluster, "neighbour");
    let spec = || JobSpec { name: victim.spec.name.clone(), ..victim.spec.clone() };
    let param = |name: &str, shape: &[u64], group| Param { name: name.into(), shape: shape.into(), group };
    let with = |params: Vec<Param>| JobSpec { params, ..spec() };
    let specs = [
        ("spec.world_size", "0", "in 1..=4096", JobSpec { world_size: 0, ..spec() }),
        ("spec.micro_steps", "0", "in 1..=65536", JobSpec { micro_steps: 0, ..spec() }),
        ("spec.max_delay", "2", "in 0..=1", JobSpec { max_delay: 2, ..spec() }),
        ("spec.shard_elements", "65537", "multiple", JobSpec { shard_elements: 65537, ..spec() }),
        ("spec.groups", "0", "in 1..=1024", JobSpec { groups: vec![], ..spec() }),
        ("spec.params", "0", "in 1..=", with(vec![])),
        (
            "spec.params[1].name",
            "twice",
            "unique",
            with(vec![param("twice", &[4], 0), param("twice", &[4], 0)]),
        ),
        ("spec.params[0].shape", "[0]", "1 to", with(vec![param("empty", &[0], 0)])),
        (
            "spec.params[0].shape",
            "18446744073709551615",
            "1 to",
            with(vec![param("huge", &[u64::MAX, 2], 0)]),
        ),
        ("spec.params[0].group", "2", "below 2", with(vec![param("p", &[4], 2)])),
    ];
    let placement = placement(&cluster.addresses(), &victim.layout);
    for (field, value, limit, bad) in specs {
        let wire = v1::JobSpec { name: "impossible".into(), ..bad.to_wire() };
        assert_fault(victim.servers[0].open(wire, &placement, 0), Invalid, field, value, limit);
    }
    let wire = v1::JobSpec { rule: 99, name: "impossible".into(), ..spec().to_wire() };
    assert_fault(victim.servers[0].open(wire, &placement, 0), Invalid, "spec.rule", "99", "named");
    let wire = v1::JobSpec { state_format: 9, name: "impossible".into(), ..spec().to_wire() };
    assert_fault(victim.servers[0].open(wire, &placement, 0), Invalid, "spec.state_format", "9", "named");
    let wire = v1::JobSpec { name: "../escape".into(), ..spec().to_wire() };
    assert_fault(victim.servers[0].open(wire, &placement, 0), Invalid, "spec.name", "../escape", "A-Z a-z");
    let jobs = victim.servers[0].call(victim.servers[0].admin.clone().list_jobs(v1::ListJobsRequest {}));
    assert_eq!(jobs.expect("a list").jobs, ["neighbour"]);
    victim.finish();
}

#[test]
fn a_job_beyond_the_servers_memory_is_refused_with_the_shortage() {
    const MEMORY: u64 = 48 << 20;
    let cluster = Cluster::start_with(1, |config| longshore_server::Config { memory: MEMORY, ..config });
    let victim = Victim::start(&cluster, "fits");
    let held = victim.servers[0].describe("fits").memory_bytes;
    let mut spec = JobSpec { world_size: 3, ..victim.spec.clone() }.to_wire();
    spec.name = "too-large".into();
    // The need: fp32 weights and moments, two bf16 images, three ranks' bf16 contributions, their fp32 sum,
    // and the ranks' connections.
    let need = victim.layout.elements() * (12 + 2 * 2 + 3 * 2 + 4) + 3 * 2 * (7 << 20);
    let placement = placement(&cluster.addresses(), &victim.layout);
    let fault = victim.servers[0].open(spec, &placement, 0).expect_err("it does not fit");
    assert_eq!((fault.kind, fault.field.as_str()), (Exhausted, "memory"), "{fault:?}");
    assert!(fault.value.contains(&format!("{need} bytes")), "{fault:?}");
    assert!(
        fault.limit.contains(&MEMORY.to_string()) && fault.limit.contains(&held.to_string()),
        "{fault:?}"
    );
    let short = need - (MEMORY - held);
    assert!(fault.remedy.contains(&format!("short of {short} bytes")), "{fault:?}");
    victim.finish();
}

/// Such a server would wait for weights that no rank sends, and end the job at the first decision.
#[test]
fn a_server_without_a_shard_is_refused_before_it_is_opened() {
    let cluster = Cluster::start(2);
    let victim = Victim::start(&cluster, "crowded");
    let spec = JobSpec {
        name: longshore_proto::JobName::parse("name", "idle").expect("a name"),
        ..victim.spec.clone()
    };
    let shards = victim.layout.shards() as usize;
    let addresses: Vec<String> = (0..=shards).map(|server| format!("10.0.0.{server}:7070")).collect();
    let crowded = placement(&addresses, &victim.layout);
    for server in [0, shards as u32] {
        let found = victim.servers[0].open(spec.to_wire(), &crowded, server);
        let idle =
            format!("{} servers, of which server {shards} (10.0.0.{shards}:7070) owns no shard", shards + 1);
        assert_fault(found, Invalid, "placement.servers", &idle, "at least one of the 4 shards");
    }
    assert!(victim.servers[0].find("idle").is_err(), "it was not opened");
    victim.finish();
}
