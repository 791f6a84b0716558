//! Readers of a job's state that stall, leave, or ask for a distant version. Such readers neither delay
//! training nor grow the server's memory.

use std::time::{Duration, Instant};

use longshore_proto::{Dtype, Fault, FaultKind, Hyper, JobName, JobSpec, Param, limits::MAX_EXPORTS_AT_ONCE};
use longshore_tests::conformance::{
    cluster::{Cluster, eventually},
    raw::{Raw, assert_fault},
};
use longshore_wire::{dtype_to_wire, v1};
use longshore_worker::{LossScaler, Options, Pipeline, PipelineOptions, Session, Transport};
use tonic::Streaming;

const JOB: &str = "read";
const PARAMS: usize = 12;
const ELEMENTS: u64 = 1 << 20;
/// The server cuts a stalled reader off after this. A step that waited for the reader would not be done
/// before.
const STALL: Duration = Duration::from_secs(10);

/// A job of 48 MiB as fp32: more than fits between a server and a stalled reader.
fn spec() -> JobSpec {
    let param = |index| Param { name: format!("p{index}"), shape: vec![ELEMENTS], group: 0 };
    JobSpec {
        shard_elements: ELEMENTS,
        ..JobSpec::new(JobName::parse("name", JOB).expect("a name"), (0..PARAMS).map(param).collect())
    }
}

fn enter(cluster: &Cluster) -> Pipeline {
    let options = Options { transport: Transport::Tcp, ..cluster.options(&spec(), 0) };
    let mut session = Session::connect(options).expect("a session");
    let joined = session.start(&|_| vec![0.5; ELEMENTS as usize]).expect("a job");
    let scaler = LossScaler::fixed(1.0).expect("a scale");
    let options = PipelineOptions::new(scaler, |_| vec![Hyper::default()]);
    Pipeline::new(session, &joined, options).expect("a pipeline")
}

fn step(pipeline: &mut Pipeline, gradient: &[f32]) {
    pipeline.begin().expect("a step");
    pipeline.weights().expect("weights").wait(0..PARAMS as u64 * ELEMENTS).expect("weights");
    let mut assembler = pipeline.assembler(0).expect("a micro-step");
    for param in (0..PARAMS).rev() {
        assembler.put(param, gradient).expect("a gradient");
    }
    assembler.finish().expect("a push");
    pipeline.finish(Vec::new()).expect("a commit");
}

fn export(raw: &Raw, version: u64) -> Result<Streaming<v1::ExportResponse>, Fault> {
    let (job, dtype) = (JOB.to_string(), dtype_to_wire(Dtype::F32));
    let request = v1::ExportRequest { job, version, dtype, deadline_ms: 600_000, state: false };
    raw.call(raw.admin.clone().export(request))
}

#[test]
fn readers_who_take_nothing_hold_neither_training_nor_each_other() {
    let cluster = Cluster::start(1);
    // The readers have their own connection, since their unread bytes fill its window.
    let (mut pipeline, raw, stuck) = (enter(&cluster), cluster.raw(0), cluster.raw(0));
    let gradient: Vec<f32> = (0..ELEMENTS).map(|index| (index % 97) as f32 * 1e-3).collect();
    step(&mut pipeline, &gradient);
    let begun = Instant::now();
    let readers: Vec<_> = (0..MAX_EXPORTS_AT_ONCE).map(|_| export(&stuck, 0).expect("an export")).collect();
    for _ in 0..3 {
        step(&mut pipeline, &gradient);
    }
    // Stuck readers hold no shard, so the hash does not wait for them.
    let request = v1::DescribeRequest { job: JOB.to_string(), state_hash: true, ..Default::default() };
    let described = raw.call(raw.admin.clone().describe(request)).expect("a hash");
    let took = begun.elapsed();
    eprintln!("three steps and a hash beside {} stuck readers took {took:?}", readers.len());
    assert!(took < STALL, "the readers held something: {took:?}");
    assert!(described.hash_version >= 3, "hash of version {}", described.hash_version);
    assert_fault(export(&raw, 0).map(drop), FaultKind::Exhausted, "exports", "4", "fewer than 4");
    drop(readers);
    eventually("room for a reader", || export(&raw, 0).ok());
}

#[test]
fn an_export_of_a_version_to_come_holds_no_deleted_job() {
    let cluster = Cluster::start(1);
    let (pipeline, raw) = (enter(&cluster), cluster.raw(0));
    let mut waiting = export(&raw, 1_000_000).expect("an export");
    let gone: Vec<_> = (1..MAX_EXPORTS_AT_ONCE).map(|_| export(&raw, 1_000_000).expect("another")).collect();
    assert_fault(export(&raw, 0).map(drop), FaultKind::Exhausted, "exports", "4", "fewer than 4");
    // The server does not wait for readers that left.
    drop(gone);
    eventually("room for a reader", || export(&raw, 1_000_000).ok());
    drop(pipeline);
    let request = v1::DeleteJobRequest { job: JOB.to_string(), discard_unreadable: false };
    raw.call(raw.admin.clone().delete_job(request)).expect("deleted");
    eventually("the job's memory to be free", || {
        let jobs = raw.call(raw.admin.clone().list_jobs(v1::ListJobsRequest {})).expect("a list");
        (jobs.memory_reserved == 0).then_some(())
    });
    let status =
        raw.call(async { waiting.message().await.map(|message| tonic::Response::new(message.is_some())) });
    assert_fault(status, FaultKind::NotFound, "job", JOB, "open on this server");
}
