//! A server refuses a decision if its contributions differ from those behind the decision. The servers that
//! took it must take it back. Completed anyway, the step would have different gradients on different servers,
//! and a norm that fits neither.

use std::{
    ops::Range,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
};

use longshore_proto::{Hyper, Incarnation, JobName, JobSpec, Param, Rank, TierKind, limits::BLOCK_ELEMENTS};
use longshore_tests::{
    conformance::{
        cluster::{Cluster, DEADLINE, eventually},
        raw::Raw,
    },
    server::{self, Longshored, ServerOptions},
};
use longshore_wire::v1::PauseRequest;
use longshore_worker::{
    Interrupt, LossScaler, Options, Pipeline, PipelineOptions, Session,
    error::{Error, Result},
};
use tempfile::TempDir;
use tokio::runtime::Runtime;

const JOB: &str = "refused";
const ALL: Range<u64> = 0..4 * BLOCK_ELEMENTS;
/// Factors of a rank's gradient, before and after its process was replaced.
const BEFORE: f32 = 1.0;
const AFTER: f32 = 3.0;

/// A parameter in four shards, placed on two servers in turn.
fn spec(tier: TierKind) -> JobSpec {
    JobSpec {
        world_size: 2,
        shard_elements: BLOCK_ELEMENTS,
        tier,
        ..JobSpec::new(
            JobName::parse("name", JOB).expect("a name"),
            vec![Param { name: "all".into(), shape: vec![ALL.end], group: 0 }],
        )
    }
}

fn numbers(seed: u64) -> impl Iterator<Item = f32> {
    ALL.map(move |element| ((element * 31 + seed * 17) % 1009) as f32 / 1009.0 - 0.5)
}

struct Trainer {
    pipeline: Pipeline,
    incarnation: Incarnation,
}

impl Trainer {
    fn enter(options: Options) -> Trainer {
        let mut session = Session::connect(options).expect("servers");
        let joined = session.start(&|_| numbers(0).collect()).expect("a rank");
        let hyper = |_| vec![Hyper { lr: 1e-2, ..Hyper::default() }];
        // The clip coefficient depends on the whole gradient's norm.
        let how = PipelineOptions {
            clip: Some(0.1),
            ..PipelineOptions::new(LossScaler::fixed(1.0).expect("a scale"), hyper)
        };
        let incarnation = joined.incarnation;
        Trainer { pipeline: Pipeline::new(session, &joined, how).expect("a pipeline"), incarnation }
    }

    /// Begins a step, and pushes all of its gradient.
    fn push(&mut self, factor: f32) -> Result<()> {
        let step = self.pipeline.begin()?.step;
        let mut values = vec![0.0; ALL.end as usize];
        self.pipeline.weights()?.read(ALL, &mut values)?;
        let noise = numbers(1 + step.0 * 2 + u64::from(self.pipeline.session().rank().0));
        for (value, noise) in values.iter_mut().zip(noise) {
            *value = (*value + noise) * factor;
        }
        let mut assembler = self.pipeline.assembler(0)?;
        assembler.put(0, &values)?;
        assembler.finish()
    }

    fn finish(&mut self) -> Result<()> {
        self.pipeline.finish(Vec::new())
    }

    fn hash(&self) -> String {
        self.pipeline.session().state_hash().expect("a hash").hash
    }
}

/// Both ranks make a step, rank 1 with this factor.
fn step(ranks: &mut [Trainer; 2], factor: f32) {
    ranks[0].push(BEFORE).expect("rank 0's gradient");
    ranks[1].push(factor).expect("rank 1's gradient");
    ranks.iter_mut().for_each(|rank| rank.finish().expect("a decision"));
}

/// Returns the state's hash after two undisturbed steps.
fn undisturbed(factor: f32) -> String {
    let cluster = Cluster::start(2);
    let spec = spec(TierKind::Memory);
    let mut ranks = [0, 1].map(|rank| Trainer::enter(cluster.options(&spec, rank)));
    step(&mut ranks, BEFORE);
    step(&mut ranks, factor);
    ranks[0].hash()
}

struct Bed {
    servers: Vec<Longshored>,
    runtime: Runtime,
}

impl Bed {
    fn new(root: &Path) -> Bed {
        let options = ServerOptions::new().state_root(root).allow("stepping back").allow("job paused");
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        Bed { servers: server::servers(2, &options), runtime: runtime.expect("a runtime") }
    }

    fn options(&self, rank: u32) -> Options {
        let options = Options::new(server::addresses(&self.servers), spec(TierKind::Nvme), Rank(rank));
        Options { deadline: DEADLINE, slow_deadline: DEADLINE, pause_deadline: DEADLINE, ..options }
    }

    fn raw(&self, server: usize) -> Raw {
        let address = self.servers[server].address().parse().expect("an address");
        Raw::connect(self.runtime.handle().clone(), address)
    }

    fn version(&self, server: usize) -> u64 {
        self.raw(server).progress(JOB).version
    }

    /// Blocks decisions on this server until [`Bed::resume`]. Statistics stay available.
    fn pause(&self, server: usize, incarnation: Incarnation) {
        let raw = self.raw(server);
        let reason = "a test".into();
        let request = PauseRequest { job: JOB.into(), incarnation: incarnation.0, reason };
        raw.call(raw.training.clone().pause(request)).expect("a pause");
    }

    fn resume(&self, server: usize, version: u64) {
        let raw = self.raw(server);
        eventually("a resume", || raw.resume(JOB, version, 0.0).ok());
    }
}

/// Rank 1's process is replaced once both servers have all contributions to step 2. The new process has
/// another gradient. The first server takes the decision. The second dies before, and receives the new
/// gradient. Rank 0 gets the refusal, or dies before.
fn is_taken_back(rank0_dies: bool) {
    let root = TempDir::new().expect("a folder for the servers' state");
    let mut bed = Bed::new(root.path());
    let dies = Arc::new(AtomicBool::new(false));
    let asked = Arc::clone(&dies);
    let mortal = Options { interrupt: Interrupt::when(move || asked.load(Relaxed)), ..bed.options(0) };
    let mut ranks = [Trainer::enter(mortal), Trainer::enter(bed.options(1))];
    step(&mut ranks, BEFORE);
    let [mut rank0, mut old] = ranks;
    rank0.push(BEFORE).expect("rank 0's gradient");
    old.push(BEFORE).expect("rank 1's gradient");
    (0..2).for_each(|server| bed.raw(server).await_stats(JOB, 2));
    drop(old);
    let mut rank1 = Trainer::enter(bed.options(1));
    rank1.push(AFTER).expect("the new process's gradient");
    bed.pause(1, rank0.incarnation);
    let ended = thread::scope(|scope| {
        let deciding = scope.spawn(|| rank0.finish());
        eventually("the first server's commit", || (bed.version(0) == 2).then_some(()));
        bed.servers[1].kill_and_restart();
        bed.resume(1, 1);
        bed.raw(1).await_stats(JOB, 2);
        dies.store(rank0_dies, Relaxed);
        deciding.join().expect("rank 0's thread")
    });
    match rank0_dies {
        false => assert!(matches!(ended, Err(Error::Outdated(_))), "{ended:?}"),
        true => assert!(matches!(ended, Err(Error::Interrupted(_) | Error::Outdated(_))), "{ended:?}"),
    }
    drop(rank0);
    let mut rank0 = Trainer::enter(bed.options(0));
    assert_eq!(rank0.pipeline.decided().0, 1, "the step was not taken back");
    rank0.push(BEFORE).expect("rank 0's gradient, once more");
    rank0.finish().expect("another decision");
    // The new rank 1 may have read weights of the step taken back, and then starts over.
    match rank1.finish().and_then(|()| rank1.pipeline.settle()) {
        Ok(_) => {}
        Err(Error::Outdated(_)) => {
            drop(rank1);
            assert_eq!(Trainer::enter(bed.options(1)).pipeline.decided().0, 2);
        }
        Err(error) => panic!("rank 1: {error}"),
    }
    assert_eq!(rank0.hash(), undisturbed(AFTER));
}

#[test]
fn a_decision_that_a_server_refuses_is_taken_back_on_the_others() {
    assert_ne!(undisturbed(BEFORE), undisturbed(AFTER), "the two gradients make two states");
    is_taken_back(false);
}

#[test]
fn a_decision_that_a_server_would_refuse_is_taken_back_where_rank_zero_dies() {
    is_taken_back(true);
}
