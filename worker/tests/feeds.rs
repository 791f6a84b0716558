//! Weights as they arrive: their memory, pulls ahead of a step, and the order of pulls over a slow link.

use std::time::Duration;

use longshore_proto::{Dtype, Hyper, JobName, JobSpec, Rank, Version, limits::BLOCK_ELEMENTS};
use longshore_worker::{
    Budget, Error, LossScaler, Options, Pipeline, PipelineOptions, Schedule, Session, Transport,
    pipeline::Weights,
};
use tokio::runtime::Runtime;

use crate::{config, params};

/// Starts a server that lives as long as the returned runtime.
fn serve() -> (String, Runtime) {
    let (server, runtime) = crate::serve(config());
    let address = server.address().to_string();
    std::mem::forget(server);
    (address, runtime)
}

const SIZES: [u64; 5] = [100_000, 7, 1_500_000, 64, 300_001];

fn spec(max_delay: u32, dtype: Dtype) -> JobSpec {
    JobSpec {
        gradient_dtype: dtype,
        image_dtype: dtype,
        max_delay,
        shard_elements: 4 * BLOCK_ELEMENTS,
        ..JobSpec::new(JobName::parse("name", "job").unwrap(), params(&SIZES))
    }
}

/// Returns options over TCP. Weights in shared memory would take nothing from the worker's budget, and would not wait
/// for their turn.
fn options(servers: Vec<String>, spec: JobSpec) -> Options {
    Options { transport: Transport::Tcp, ..Options::new(servers, spec, Rank(0)) }
}

fn initial(param: usize) -> Vec<f32> {
    (0..SIZES[param]).map(|index| ((index * 31 + param as u64 * 17) % 1000) as f32 / 1000.0 - 0.5).collect()
}

fn plain() -> PipelineOptions {
    PipelineOptions::new(LossScaler::fixed(1.0).unwrap(), |_| vec![Hyper::default()])
}

#[test]
fn weights_of_a_delayed_jobs_next_step_come_before_this_one_ends_where_they_have_room() {
    let (address, _runtime) = serve();
    let budget = Budget::new("host", 1 << 32);
    let options = Options { host_budget: budget.clone(), ..options(vec![address], spec(1, Dtype::Bf16)) };
    let mut session = Session::connect(options).unwrap();
    let joined = session.start(&initial).unwrap();
    let whole = 0..session.layout().elements();
    let how = PipelineOptions { schedule: Schedule::delayed(0), ..plain() };
    let mut pipeline = Pipeline::new(session, &joined, how).unwrap();
    for _ in 0..2 {
        pipeline.begin().unwrap();
        finish_step(&mut pipeline);
    }
    assert_eq!(pipeline.begin().unwrap().reads, Version(1));
    let next = pipeline.upcoming().expect("version 2 is decided");
    assert_eq!(next.version(), Version(2));
    next.wait(whole.clone()).unwrap();
    finish_step(&mut pipeline);

    // The budget has room for a gradient, but not also for the next weights, so these are not pulled ahead.
    let lease = budget.reserve("test", budget.free() - whole.end * 3).unwrap();
    assert_eq!(pipeline.begin().unwrap().reads, Version(2));
    assert!(pipeline.upcoming().is_none());
    finish_step(&mut pipeline);
    drop(lease);
    pipeline.close().unwrap().leave().unwrap();
}

/// Finishes the step that was begun, with gradients of zeros.
fn finish_step(pipeline: &mut Pipeline) {
    let mut assembler = pipeline.assembler(0).unwrap();
    for (param, &size) in SIZES.iter().enumerate().rev() {
        assembler.put(param, &vec![0.0; size as usize]).unwrap();
    }
    assembler.finish().unwrap();
    pipeline.finish(Vec::new()).unwrap();
}

#[test]
fn a_feed_is_exact_and_its_memory_is_reused() {
    let (addresses, _runtimes): (Vec<_>, Vec<_>) = [serve(), serve()].into_iter().unzip();
    let options = options(addresses, spec(0, Dtype::F32));
    let budget = options.host_budget.clone();
    let mut session = Session::connect(options).unwrap();
    session.start(&initial).unwrap();
    let layout = session.layout().clone();
    let order: Vec<_> = (0..SIZES.len()).rev().map(|param| layout.param_range(param)).collect();
    for _ in 0..3 {
        let feed = session.pull(Version(0), &order).unwrap();
        for (param, &size) in SIZES.iter().enumerate() {
            let mut values = vec![0.0; size as usize];
            feed.read(layout.param_range(param), &mut values).unwrap();
            assert!(values == initial(param));
        }
        assert!(
            matches!(feed.wait(0..layout.elements()), Err(Error::Invalid(_))),
            "the padding was not pulled"
        );
    }
    assert_eq!(budget.peak(), SIZES.iter().sum::<u64>() * 4);
    session.delete_job().unwrap();
    assert!(matches!(session.describe(), Err(Error::StateLost(_))));
}

#[test]
fn the_first_pull_has_the_link_until_it_is_there() {
    // Each of two parameters takes 8 MiB on the wire, in shards of 1 MiB. The link needs a second for 8 MiB.
    const ELEMENTS: u64 = 64 * BLOCK_ELEMENTS;
    const SHARD: u64 = 8 * BLOCK_ELEMENTS;
    let (address, _runtime) = serve();
    let spec = JobSpec {
        shard_elements: SHARD,
        ..JobSpec::new(JobName::parse("name", "turns").unwrap(), params(&[ELEMENTS; 2]))
    };
    let options = Options {
        connections: 1,
        link_bytes_per_s: Some(8 << 20),
        deadline: Duration::from_secs(120),
        ..options(vec![address], spec)
    };
    let mut session = Session::connect(options).unwrap();
    let joined = session.start(&|_| vec![1.0; ELEMENTS as usize]).unwrap();
    let ranges = [0, 1].map(|param| session.layout().param_range(param));
    let how = PipelineOptions { weights: Weights::OnDemand, ..plain() };
    let mut pipeline = Pipeline::new(session, &joined, how).unwrap();
    let reads = pipeline.begin().unwrap().reads;
    let feeds = ranges.clone().map(|range| pipeline.pull(reads, &[range]).unwrap());
    feeds[0].wait(ranges[0].clone()).unwrap();
    // Parallel pulls would both end at this time.
    let late = ranges[1].start + 6 * SHARD..ranges[1].start + 7 * SHARD;
    assert!(!feeds[1].is_ready(late.clone()), "the second came beside the first");
    feeds[1].wait(ranges[1].clone()).unwrap();
    assert!(feeds[1].is_ready(late));
}
