//! Jobs that cannot be opened: a different spec, an impossible spec, a spec that does not fit.

use longshore_proto::{
    FaultKind::{Conflict, Invalid, Precondition},
    JobName, JobSpec, Param, Rule, TierKind,
    limits::PROTOCOL,
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
    let mut renamed = spec();
    renamed.params[1].name = "other".into();
    let others = [
        ("spec.params[1]", "other [7] in group 1", renamed),
        ("spec.rule", "lion", JobSpec { rule: Rule::Lion, ..spec() }),
        ("spec.tier", "shm", JobSpec { tier: TierKind::Shm, ..spec() }),
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
    let placement = placement(&cluster.addresses(), &victim.layout);
    let huge =
        JobSpec { params: vec![Param { name: "huge".into(), shape: vec![u64::MAX, 2], group: 0 }], ..spec() };
    let wire = v1::JobSpec { name: "impossible".into(), ..huge.to_wire() };
    let found = victim.servers[0].open(wire, &placement, 0);
    assert_fault(found, Invalid, "spec.params[0].shape", "18446744073709551615", "1 to");
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

/// An older server cannot know what a newer client's fields mean.
#[test]
fn a_client_of_a_newer_protocol_is_refused() {
    let cluster = Cluster::start(2);
    let victim = Victim::start(&cluster, "newer");
    let name = JobName::parse("name", "unknown").expect("a name");
    let request = v1::OpenJobRequest {
        spec: Some(JobSpec { name, ..victim.spec.clone() }.to_wire()),
        placement: Some(placement(&cluster.addresses(), &victim.layout).to_wire()),
        server: 0,
        protocol: PROTOCOL + 1,
    };
    assert_fault(victim.servers[0].open_by(request), Precondition, "protocol", "2", "at most 1");
    assert!(victim.servers[0].find("unknown").is_err(), "it was not opened");
    victim.finish();
}
