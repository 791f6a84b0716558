//! A decision must leave out exactly the parameters that got no gradient.

use longshore_proto::{Commit, FaultKind, Incarnation, JobSpec, LeftOut, Rank, ShardId, StateFormat};

use super::{Cluster, check, commit, reference::param_ranges, small, weights};

use FaultKind::{Conflict, Fenced, Invalid};

fn left(param: u32, steps: u64, now: bool) -> LeftOut {
    LeftOut { param, steps, now }
}

/// Returns the gradient without parameter `param`, whose elements all become -0. No other parameter's gradient begins
/// with -0.
fn without(spec: &JobSpec, flat: &[u8], param: usize) -> Vec<u8> {
    let width = spec.gradient_dtype.bytes() as usize;
    let range = &param_ranges(spec)[param];
    let mut flat = flat.to_vec();
    for element in range.clone() {
        flat[element * width..(element + 1) * width].fill(0);
        flat[(element + 1) * width - 1] = 0x80;
    }
    flat
}

#[test]
fn a_decision_leaves_out_what_got_no_gradient() {
    let spec = JobSpec { leave_out: true, ..small() };
    let mut cluster = Cluster::started(&spec, 2, &weights(&spec, 1));
    let flats: Vec<_> =
        (0..spec.contributions(spec.world_size)).map(|seed| super::gradient(&spec, seed, 1.0)).collect();
    let nothing: Vec<_> = flats.iter().map(|flat| without(&spec, flat, 0)).collect();
    cluster.push(1, &nothing);
    let owner = cluster.owner(ShardId(0));
    let hash = cluster.hash();
    let refused = |cluster: &Cluster,
                   step,
                   list: &[LeftOut],
                   kind,
                   field: &'static str,
                   words: &'static [&'static str]| {
        let decision = Commit { left_out: list.to_vec(), ..commit(&spec, step) };
        let fault = cluster.jobs[owner].commit(cluster.incarnations[0], decision.clone()).unwrap_err();
        check(&fault, (kind, field, words));
        // A caller that may not decide is refused for that first.
        if kind == Conflict {
            let fault = cluster.jobs[owner].commit(Incarnation(0), decision).unwrap_err();
            assert_eq!(fault.kind, Fenced, "{fault}");
        }
    };
    let list = "commit.left_out";
    refused(&cluster, 1, &[], Conflict, list, &["without \"layer.0\"", "nobody gave it a gradient"]);
    refused(&cluster, 1, &[left(0, 1, true), left(1, 1, true)], Conflict, list, &["it got a gradient"]);
    refused(&cluster, 1, &[left(0, 2, true)], Invalid, list, &["that follow from the commit before"]);
    refused(&cluster, 1, &[left(0, 1, false)], Invalid, list, &["that follow from the commit before"]);
    refused(&cluster, 1, &[left(0, 0, true)], Invalid, "commit.left_out[0].steps", &["at least 1"]);
    let (first, second) = (left(1, 1, true), left(0, 1, true));
    refused(&cluster, 1, &[first, second], Invalid, "commit.left_out[1].param", &["ascending"]);
    refused(&cluster, 1, &[left(99, 1, true)], Invalid, "commit.left_out[0].param", &["in 0.."]);
    assert_eq!(cluster.hash(), hash);
    cluster.commit(&Commit { left_out: vec![left(0, 1, true)], ..commit(&spec, 1) }).unwrap();
    cluster.work();
    // A gradient of a single rank counts, even if no other rank has one.
    let mut one = nothing.clone();
    one[0].clone_from(&flats[0]);
    cluster.push(2, &one);
    refused(&cluster, 2, &[left(0, 2, true)], Conflict, list, &["it got a gradient"]);
    refused(&cluster, 2, &[], Invalid, list, &["the 1 that follow"]);
    cluster.commit(&Commit { left_out: vec![left(0, 1, false)], ..commit(&spec, 2) }).unwrap();
    cluster.work();
    // A skipped step changes no count, even if parameters got no gradient.
    cluster.push(3, &nothing);
    let skip = Commit { skip: true, ..commit(&spec, 3) };
    let fault = cluster.jobs[owner].commit(cluster.incarnations[0], skip.clone()).unwrap_err();
    check(&fault, (Invalid, list, &["the 1 that follow"]));
    cluster.commit(&Commit { left_out: vec![left(0, 1, false)], ..skip }).unwrap();
}

/// A server has refused a decision that another one has applied. The next rank 0 brings both to one state, whatever the
/// decision leaves out.
#[test]
fn a_decision_that_one_server_has_applied_is_completed_on_the_other() {
    let spec = JobSpec { leave_out: true, ..small() };
    let flats: Vec<_> =
        (0..spec.contributions(spec.world_size)).map(|seed| super::gradient(&spec, seed, 1.0)).collect();
    let nothing: Vec<_> = flats.iter().map(|flat| without(&spec, flat, 0)).collect();
    let start = |flats: &[Vec<u8>]| {
        let mut cluster = Cluster::started(&spec, 2, &weights(&spec, 1));
        cluster.push(1, flats);
        let decided_by = cluster.incarnations[0];
        (cluster, Commit { left_out: vec![left(0, 1, true)], decided_by, ..commit(&spec, 1) })
    };
    let (mut cluster, decision) = start(&flats);
    let owner = cluster.owner(ShardId(0));
    let [here, other] = [owner, 1 - owner].map(|server| cluster.jobs[server].clone());
    let first = decision.decided_by;
    let fault = here.commit(first, decision.clone()).unwrap_err();
    check(&fault, (Conflict, "commit.left_out", &["it got a gradient"]));
    let (_, work) = other.commit(first, decision.clone()).unwrap();
    cluster.works[1 - owner].extend(work);
    // The next process of rank 0 finds two versions on the servers.
    let next = Incarnation(first.0 + 1);
    cluster.jobs.iter().for_each(|job| job.protocol.fence(Rank(0), next).unwrap());
    let (_, work) = here.commit(next, decision).unwrap();
    cluster.works[owner].extend(work);
    cluster.work();
    let (mut expected, decision) = start(&nothing);
    expected.commit(&decision).unwrap();
    expected.work();
    let versions: Vec<_> = cluster.jobs.iter().map(|job| job.progress().version.0).collect();
    assert_eq!((versions, cluster.exported()), (vec![1, 1], expected.exported()));
}

/// In a job without `leave_out`, -0 is a number like others.
#[test]
fn a_job_that_was_not_asked_to_leaves_nothing_out() {
    let spec = small();
    let mut cluster = Cluster::started(&spec, 2, &weights(&spec, 1));
    let flats: Vec<_> = (0..spec.contributions(spec.world_size))
        .map(|seed| without(&spec, &super::gradient(&spec, seed, 1.0), 0))
        .collect();
    cluster.push(1, &flats);
    let fault = cluster.commit(&Commit { left_out: vec![left(0, 1, true)], ..commit(&spec, 1) }).unwrap_err();
    check(&fault, (Invalid, "commit.left_out[0].now", &["false", "without leave_out"]));
    cluster.commit(&commit(&spec, 1)).unwrap();
}

#[test]
fn a_job_that_could_not_leave_parameters_out_is_refused() {
    let spec = JobSpec { leave_out: true, ..small() };
    assert!(spec.validate().is_ok());
    let mut low = spec.clone();
    low.formats.state = StateFormat::Block8;
    let words: &[&str] = &["f32 or bf16 (parameters share 8-bit scales) with leave_out", "zeros then count"];
    check(&low.validate().unwrap_err(), (Invalid, "spec.state_format", words));
    let mut many = spec;
    let param = many.params[0].clone();
    many.params =
        (0..65_537).map(|n| longshore_proto::Param { name: n.to_string(), ..param.clone() }).collect();
    check(
        &many.validate().unwrap_err(),
        (Invalid, "spec.params", &["65537", "at most 65536 with leave_out"]),
    );
}
