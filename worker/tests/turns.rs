//! Over a slow link the first request completes first.

use std::time::Duration;

use longshore_proto::{Hyper, JobName, JobSpec, Param, Rank, limits::BLOCK_ELEMENTS};
use longshore_server::{Config, Server};
use longshore_worker::{
    LossScaler, Options, Pipeline, PipelineOptions, Schedule, Session, Transport, pipeline::Weights,
};

/// Each of two parameters is 8 MiB on the wire, in shards of 1 MiB.
const ELEMENTS: u64 = 64 * BLOCK_ELEMENTS;
const SHARD: u64 = 8 * BLOCK_ELEMENTS;
/// A parameter takes one second.
const LINK: u64 = 8 << 20;

fn spec() -> JobSpec {
    let param = |index| Param { name: format!("p{index}"), shape: vec![ELEMENTS], group: 0 };
    JobSpec {
        shard_elements: SHARD,
        ..JobSpec::new(JobName::parse("name", "turns").unwrap(), (0..2).map(param).collect())
    }
}

#[test]
fn the_first_pull_has_the_link_until_it_is_there() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let config = Config { memory: 1 << 30, threads: 1, ..Config::default_on("127.0.0.1:0".parse().unwrap()) };
    let server = runtime.block_on(Server::start(config)).unwrap();
    let options = Options {
        transport: Transport::Tcp,
        connections: 1,
        link_bytes_per_s: Some(LINK),
        deadline: Duration::from_secs(120),
        ..Options::new(vec![server.address().to_string()], spec(), Rank(0))
    };
    let mut session = Session::connect(options).unwrap();
    let joined = session.start(&|_| vec![1.0; ELEMENTS as usize]).unwrap();
    let layout = session.layout().clone();
    let hyper = |_| vec![Hyper::default()];
    let how = PipelineOptions {
        schedule: Schedule::exact(),
        weights: Weights::OnDemand,
        ..PipelineOptions::new(LossScaler::fixed(1.0).unwrap(), hyper)
    };
    let mut pipeline = Pipeline::new(session, &joined, how).unwrap();
    let reads = pipeline.begin().unwrap().reads;
    let ranges = [0, 1].map(|param| layout.param_range(param));
    let feeds = ranges.clone().map(|range| pipeline.pull(reads, &[range]).unwrap());
    feeds[0].wait(ranges[0].clone()).unwrap();
    // In parallel both would end together.
    let late = ranges[1].start + 6 * SHARD..ranges[1].start + 7 * SHARD;
    assert!(!feeds[1].is_ready(late.clone()), "the second came beside the first");
    feeds[1].wait(ranges[1].clone()).unwrap();
    assert!(feeds[1].is_ready(late));
    std::mem::forget(server);
}
