//! Waits past the deadline while every process lives: the names in their errors, and the ends that come
//! before.

use std::{
    ops::Range,
    thread,
    time::{Duration, Instant},
};

use longshore_proto::{Hyper, JobName, JobSpec, Param, Rank, limits::BLOCK_ELEMENTS};
use longshore_server::{Config, Server};
use longshore_worker::{Error, LossScaler, Options, Pipeline, PipelineOptions, Result, Session};
use tokio::runtime::Runtime;

const ALL: Range<u64> = 0..BLOCK_ELEMENTS;

/// A job of two ranks on one server.
struct Job {
    /// None after the drop.
    runtime: Option<Runtime>,
    server: Server,
    deadline: Duration,
    slow_deadline: Duration,
}

impl Job {
    fn new(deadline: Duration, slow_deadline: Duration) -> Job {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        let runtime = runtime.unwrap();
        let defaults = Config::default_on("127.0.0.1:0".parse().unwrap());
        let config = Config { memory: 1 << 30, threads: 1, ..defaults };
        let server = runtime.block_on(Server::start(config)).unwrap();
        Job { runtime: Some(runtime), server, deadline, slow_deadline }
    }

    fn enter(&self, rank: u32) -> Pipeline {
        let spec = JobSpec {
            world_size: 2,
            shard_elements: BLOCK_ELEMENTS,
            ..JobSpec::new(
                JobName::parse("name", "waits").unwrap(),
                vec![Param { name: "all".into(), shape: vec![ALL.end], group: 0 }],
            )
        };
        let options = Options::new(vec![self.server.address().to_string()], spec, Rank(rank));
        let options = Options { deadline: self.deadline, slow_deadline: self.slow_deadline, ..options };
        let mut session = Session::connect(options).unwrap();
        let joined = session.start(&|_| vec![1.0; ALL.end as usize]).unwrap();
        let how = PipelineOptions::new(LossScaler::fixed(1.0).unwrap(), |_| vec![Hyper::default()]);
        Pipeline::new(session, &joined, how).unwrap()
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// Pushes a step's whole gradient, and waits until the server has it.
fn push(pipeline: &mut Pipeline) -> Result<()> {
    pipeline.begin()?;
    let mut values = vec![0.0; ALL.end as usize];
    pipeline.weights()?.read(ALL, &mut values)?;
    let mut assembler = pipeline.assembler(0)?;
    assembler.put(0, &values)?;
    assembler.finish()?;
    let begun = Instant::now();
    while pipeline.session().unacknowledged_chunks() > 0 {
        assert!(begun.elapsed() < Duration::from_secs(60), "a gradient is not taken");
        thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

#[test]
fn a_decision_that_does_not_come_names_whom_the_servers_wait_for() {
    let job = Job::new(Duration::from_secs(3), Duration::from_secs(4));
    let (mut rank0, _rank1) = (job.enter(0), job.enter(1));
    push(&mut rank0).unwrap();
    let ended = rank0.finish(Vec::new());
    // The trainer's wait and that for statistics end at nearly the same time.
    let late = ended.unwrap_err().to_string();
    assert!(late.contains(&job.server.address().to_string()) && late.contains("rank 1"), "{late}");
}

#[test]
fn a_rank_that_was_replaced_hears_of_it_while_it_waits() {
    let job = Job::new(Duration::from_secs(2), Duration::from_secs(90));
    let (mut old, _rank1) = (job.enter(0), job.enter(1));
    push(&mut old).unwrap();
    let waiting = thread::spawn(move || {
        let begun = Instant::now();
        (old.finish(Vec::new()), begun.elapsed())
    });
    let _new = job.enter(0);
    let (ended, waited) = waiting.join().unwrap();
    assert!(matches!(ended, Err(Error::Fenced(_))), "{ended:?}");
    assert!(waited < Duration::from_secs(45), "{waited:?}");
}
