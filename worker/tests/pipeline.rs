//! Sessions and pipelines against real servers in this process, over loopback.

use std::{
    net::SocketAddr,
    thread,
    time::{Duration, Instant},
};

use longshore_proto::{
    DECISION_AWAITED, Dtype, Hyper, JobName, JobSpec, Param, Partition, Rank, Step, Version,
    limits::BLOCK_ELEMENTS,
};
use longshore_server::{Config, Server};
use longshore_wire::v1::{self, training_client::TrainingClient};
use longshore_worker::{
    Budget, Error, LossScaler, Options, Pipeline, PipelineOptions, Result, Schedule, Session, StateHash,
    StepOutcome, Transport, pipeline::Weights,
};
use tokio::runtime::Runtime;
use tonic::transport::Channel;

fn log() {
    let _ = tracing_subscriber::fmt().with_max_level(tracing::Level::WARN).with_test_writer().try_init();
}

/// Servers, each on its own runtime, so that one can die alone.
struct Servers(Vec<(Runtime, SocketAddr)>);

fn serve(at: SocketAddr) -> (Runtime, SocketAddr) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let server = runtime.block_on(async {
        let config = Config { memory: 1 << 30, threads: 1, ..Config::default_on(at) };
        Server::start(config).await.unwrap()
    });
    let address = server.address();
    // The server's tasks live as long as the runtime; a drop of the handle would end nothing.
    std::mem::forget(server);
    (runtime, address)
}

impl Servers {
    fn start(count: usize) -> Servers {
        log();
        Servers((0..count).map(|_| serve("127.0.0.1:0".parse().unwrap())).collect())
    }

    fn addresses(&self) -> Vec<String> {
        self.0.iter().map(|(_, address)| address.to_string()).collect()
    }
}

impl Drop for Servers {
    fn drop(&mut self) {
        for (runtime, _) in self.0.drain(..) {
            runtime.shutdown_background();
        }
    }
}

const SIZES: [u64; 5] = [100_000, 7, 1_500_000, 64, 300_001];

fn spec(world_size: u32, micro_steps: u32, max_delay: u32, dtype: Dtype) -> JobSpec {
    let param =
        |(index, &size): (usize, &u64)| Param { name: format!("p{index}"), shape: vec![size], group: 0 };
    JobSpec {
        gradient_dtype: dtype,
        image_dtype: dtype,
        world_size,
        micro_steps,
        max_delay,
        shard_elements: 4 * BLOCK_ELEMENTS,
        ..JobSpec::new(JobName::parse("name", "job").unwrap(), SIZES.iter().enumerate().map(param).collect())
    }
}

fn options(servers: Vec<String>, spec: JobSpec, rank: u32) -> Options {
    Options { deadline: Duration::from_secs(20), ..Options::new(servers, spec, Rank(rank)) }
}

fn initial(param: usize) -> Vec<f32> {
    (0..SIZES[param]).map(|index| ((index * 31 + param as u64 * 17) % 1000) as f32 / 1000.0 - 0.5).collect()
}

fn hyper(step: Step) -> Vec<Hyper> {
    vec![Hyper { lr: 1e-3 / (step.0 as f64).sqrt(), weight_decay: 0.01, ..Hyper::default() }]
}

/// A gradient that depends on all its inputs: weights read, rank, step, micro-step.
fn backward(weights: &[f32], rank: u32, step: Step, micro: u32, scale: f64, target: &mut Vec<f32>) {
    let noise = (u64::from(rank) * 7 + step.0 * 13 + u64::from(micro) * 5) % 11;
    target.clear();
    target.extend(weights.iter().map(|weight| ((weight - 0.1 * noise as f32) as f64 * scale) as f32));
}

fn step(pipeline: &mut Pipeline, rank: u32) -> Result<Step> {
    let plan = pipeline.begin()?;
    let layout = pipeline.session().layout().clone();
    let weights = pipeline.weights()?;
    let mut values = Vec::new();
    for (param, &size) in SIZES.iter().enumerate() {
        let mut value = vec![0.0; size as usize];
        weights.read(layout.param_range(param), &mut value)?;
        values.push(value);
    }
    drop(weights);
    let mut gradient = Vec::new();
    for micro in 0..pipeline.session().spec().micro_steps {
        let mut assembler = pipeline.assembler(micro)?;
        for param in (0..SIZES.len()).rev() {
            backward(&values[param], rank, plan.step, micro, plan.loss_scale, &mut gradient);
            assembler.put(param, &gradient)?;
        }
        assembler.finish()?;
    }
    pipeline.finish(format!("after {}", plan.step).into_bytes())?;
    Ok(plan.step)
}

fn plain() -> PipelineOptions {
    PipelineOptions { clip: Some(1.0), ..PipelineOptions::new(LossScaler::fixed(128.0).unwrap(), hyper) }
}

/// Returns whether every server has the whole gradient of its next step, and waits for rank 0's decision.
fn lack_the_decision_alone(session: &Session) -> bool {
    let answers = session.describe().unwrap();
    answers.iter().all(|server| server.waiting_for.starts_with(DECISION_AWAITED))
}

/// The first parameter of each rank's partition. Each rank holds reduced gradients of its partition.
const PARTITIONS: [u32; 4] = [0, 1, 2, 3];

/// Trains a partitioned job with these contributors. The outcomes are rank 0's.
fn train_partitions(
    servers: &Servers,
    world_size: u32,
    contributors: impl Fn(u32) -> Vec<Rank>,
    transport: Transport,
) -> (StateHash, Vec<StepOutcome>, Vec<u64>) {
    let partition = |index: usize| Partition { first: PARTITIONS[index], ranks: contributors(index as u32) };
    let partitions = (0..PARTITIONS.len()).map(partition).collect();
    let name = format!("world-{world_size}-{transport:?}");
    let name = JobName::parse("name", &name).unwrap();
    let spec = JobSpec { name, partitions, ..spec(world_size, 1, 1, Dtype::Bf16) };
    let run = move |rank: u32, options: Options| -> Result<(Option<StateHash>, Vec<StepOutcome>)> {
        let mut session = Session::connect(options)?;
        let joined = session.start(&initial)?;
        let layout = session.layout().clone();
        let own = layout.contributed_by(Rank(rank)).collect();
        let how =
            PipelineOptions { weights: Weights::Ranges(own), schedule: Schedule::delayed(3), ..plain() };
        let mut pipeline = Pipeline::new(session, &joined, how)?;
        let mut gradient = Vec::new();
        for _ in 0..8 {
            let plan = pipeline.begin()?;
            let weights = pipeline.weights()?;
            let mut assembler = pipeline.assembler(0)?;
            for (param, &size) in SIZES.iter().enumerate().rev() {
                if !layout.param_contributors(param).contains(&Rank(rank)) {
                    continue;
                }
                let mut values = vec![0.0; size as usize];
                weights.read(layout.param_range(param), &mut values)?;
                // The gradient has the noise of the partition's own rank, whichever rank pushes it.
                let owner = PARTITIONS.iter().rposition(|&first| first as usize <= param).unwrap() as u32;
                backward(&values, owner, plan.step, 0, plan.loss_scale, &mut gradient);
                assembler.put(param, &gradient)?;
            }
            assembler.finish()?;
            pipeline.finish(Vec::new())?;
        }
        assert_eq!(pipeline.drain()?, Version(8));
        let outcomes = pipeline.outcomes();
        let hash = (rank == 0).then(|| pipeline.session().state_hash()).transpose()?;
        pipeline.close()?.leave()?;
        Ok((hash, outcomes))
    };
    let ranks: Vec<_> = (0..world_size)
        .map(|rank| {
            let options = Options { transport, ..options(servers.addresses(), spec.clone(), rank) };
            thread::spawn(move || run(rank, options).unwrap_or_else(|error| panic!("rank {rank}: {error}")))
        })
        .collect();
    let mut results: Vec<_> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
    let moved = |outcomes: &[StepOutcome]| outcomes.iter().map(|one| one.timing.pushed_bytes).sum();
    let pushed = results.iter().map(|(_, outcomes)| moved(outcomes)).collect();
    let (hash, outcomes) = results.remove(0);
    (hash.unwrap(), outcomes, pushed)
}

#[test]
fn ranks_that_push_their_partitions_make_the_bits_of_one_that_pushes_all() {
    let one = Servers::start(1);
    let three = Servers::start(3);
    let alone = |_| vec![Rank(0)];
    let (known, outcomes, pushed) = train_partitions(&one, 1, alone, Transport::Tcp);
    let whole = pushed[0];
    for transport in [Transport::Tcp, Transport::Auto] {
        let own = |index| vec![Rank(index)];
        let (hash, found, pushed) = train_partitions(&three, 4, own, transport);
        assert_eq!(hash, known);
        for (found, known) in found.iter().zip(&outcomes) {
            assert_eq!((found.norm, found.clip_coefficient), (known.norm, known.clip_coefficient));
        }
        // Together the ranks push as much as one rank alone.
        assert_eq!(pushed.iter().sum::<u64>(), whole);
    }
    // Two ranks hold the same gradient of two partitions; its mean is that gradient.
    let (known, outcomes, _) = train_partitions(&three, 1, |_| vec![Rank(0)], Transport::Tcp);
    let contributors = |index| if index < 2 { vec![Rank(0), Rank(1)] } else { vec![Rank(index - 2)] };
    let (hash, found, _) = train_partitions(&three, 2, contributors, Transport::Tcp);
    assert_eq!((hash, found[7].norm), (known, outcomes[7].norm));
}

/// Commits on a server that has all contributions, once its last sum is formed.
async fn commit_once_summed(client: &mut TrainingClient<Channel>, request: &v1::CommitRequest) {
    let started = Instant::now();
    while let Err(status) = client.commit(request.clone()).await {
        assert!(status.message().contains("the sum of"), "{status}");
        assert!(started.elapsed() < Duration::from_secs(10), "the sum did not come: {status}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Returns a server's newest incarnation of rank 1, and the version at which it joined.
fn rank_one(session: &Session, server: usize) -> (u64, u64) {
    let answer = session.describe().unwrap().swap_remove(server);
    let rank = answer.ranks.into_iter().find(|rank| rank.rank == 1);
    rank.map_or((0, 0), |rank| (rank.incarnation, rank.joined_at))
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let started = Instant::now();
    while !is_so() {
        assert!(started.elapsed() < Duration::from_secs(10), "{what} did not come");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Rank 0 tells from `joined_at` whether a rank can send a gradient that a server lacks. A process that joins
/// during a decision must not appear to have joined before it.
#[test]
fn a_process_that_joins_during_a_decision_has_joined_after_it() {
    let servers = Servers::start(3);
    let addresses = servers.addresses();
    let spec = spec(2, 1, 0, Dtype::Bf16);
    let ranks: Vec<_> = (0..2)
        .map(|rank| {
            let options = options(addresses.clone(), spec.clone(), rank);
            thread::spawn(move || {
                let mut session = Session::connect(options).unwrap();
                let joined = session.start(&initial).unwrap();
                let mut pipeline = Pipeline::new(session, &joined, plain()).unwrap();
                step(&mut pipeline, rank).unwrap();
                pipeline.begin().unwrap();
                pipeline.weights().unwrap().read(0..1, &mut [0.0]).unwrap();
                let mut assembler = pipeline.assembler(0).unwrap();
                for (param, &size) in SIZES.iter().enumerate() {
                    assembler.put(param, &vec![1.0; size as usize]).unwrap();
                }
                assembler.finish().unwrap();
                (pipeline, joined.incarnation.0)
            })
        })
        .collect();
    let mut ranks: Vec<_> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
    let (old, _) = ranks.pop().unwrap();
    let (zero, incarnation) = ranks.pop().unwrap();
    until("both gradients", || lack_the_decision_alone(zero.session()));
    drop(old);
    let runtime = Runtime::new().unwrap();
    let commit = |server: usize| {
        let answer = zero.session().describe().unwrap().swap_remove(0);
        let mut commit = answer.progress.unwrap().last_commit.expect("step 1 is decided");
        commit.step = 2;
        let request = v1::CommitRequest {
            job: "job".into(),
            incarnation,
            commit: Some(commit),
            origin: 0,
            report: None,
        };
        let address = format!("http://{}", addresses[server]);
        runtime.block_on(async {
            let mut client = TrainingClient::connect(address).await.unwrap();
            commit_once_summed(&mut client, &request).await;
        });
    };
    commit(2);
    let before = rank_one(zero.session(), 0).0;
    let options = options(addresses.clone(), spec, 1);
    let new = thread::spawn(move || Session::connect(options).unwrap().start(&initial).unwrap());
    until("the new process", || (0..3).all(|server| rank_one(zero.session(), server).0 > before));
    assert_eq!(rank_one(zero.session(), 0).1, 1);
    commit(0);
    until("the new process after the decision", || rank_one(zero.session(), 0).1 == 2);
    commit(1);
    assert_eq!(new.join().unwrap().version, Version(2));
}

#[test]
fn weights_of_a_delayed_jobs_next_step_come_before_this_one_ends_where_they_have_room() {
    let servers = Servers::start(1);
    let options =
        Options { transport: Transport::Tcp, ..options(servers.addresses(), spec(1, 1, 1, Dtype::Bf16), 0) };
    let budget = Budget::new("host", 1 << 32);
    let options = Options { host_budget: budget.clone(), ..options };
    let mut session = Session::connect(options).unwrap();
    let joined = session.start(&initial).unwrap();
    let whole = 0..session.layout().elements();
    let how = PipelineOptions { schedule: Schedule::delayed(0), ..plain() };
    let mut pipeline = Pipeline::new(session, &joined, how).unwrap();
    for _ in 0..2 {
        step(&mut pipeline, 0).unwrap();
    }
    assert_eq!(pipeline.begin().unwrap().reads, Version(1));
    let next = pipeline.upcoming().expect("version 2 is decided");
    assert_eq!(next.version(), Version(2));
    next.wait(whole.clone()).unwrap();
    finish_step(&mut pipeline);

    // The budget has room for a gradient, but not for weights beside it.
    let lease = budget.reserve("test", budget.free() - whole.end * 3).unwrap();
    assert_eq!(pipeline.begin().unwrap().reads, Version(2));
    assert!(pipeline.upcoming().is_none());
    finish_step(&mut pipeline);
    drop(lease);
    pipeline.close().unwrap().leave().unwrap();
}

/// Finishes a step that was begun, with a gradient of zeros.
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
    let servers = Servers::start(2);
    let spec = spec(1, 1, 0, Dtype::F32);
    // Weights in shared memory take nothing from the worker's budget.
    let options = Options { transport: Transport::Tcp, ..options(servers.addresses(), spec, 0) };
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
    let started = Instant::now();
    while budget.used() > budget.peak() && started.elapsed() < Duration::from_secs(1) {}
    session.delete_job().unwrap();
    assert!(matches!(session.describe(), Err(Error::StateLost(_))));
}
