//! A server's memory stays within a job's admission, however many ranks push and however slow one rank is.

use std::{
    sync::{
        Arc, Barrier, Condvar, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use longshore_proto::{Hyper, JobName, JobSpec, Param, Rank, TierKind};
use longshore_tests::{
    conformance::cluster::eventually, process::memory_of, server::ServerOptions, soak, status::job_status,
};
use longshore_worker::{LossScaler, Options, Pipeline, PipelineOptions, Session, Transport};
use tempfile::TempDir;

const RANKS: u32 = 16;
const SLOW: u32 = 7;
const PARAMS: usize = 12;
const ELEMENTS: u64 = 1 << 20;
const STEPS: u64 = 3;
/// The step in which the slow rank stops.
const STALLS_IN: u64 = 2;

/// Returns how long the slow rank stops. In the slow tests that is 30 s, the longest absence that other ranks accept.
fn stall() -> Duration {
    Duration::from_secs(soak::pick(2, 30))
}

fn spec(tier: TierKind) -> JobSpec {
    let param = |index| Param { name: format!("p{index}"), shape: vec![ELEMENTS], group: 0 };
    JobSpec {
        world_size: RANKS,
        shard_elements: ELEMENTS,
        tier,
        ..JobSpec::new(
            JobName::parse("name", "many-ranks").expect("a name"),
            (0..PARAMS).map(param).collect(),
        )
    }
}

struct Stall {
    begun: AtomicBool,
    over: Mutex<bool>,
    ended: Condvar,
}

impl Stall {
    fn hold(&self) {
        self.begun.store(true, Ordering::Release);
        let over = self.over.lock().unwrap();
        drop(self.ended.wait_while(over, |over| !*over).unwrap());
    }

    fn end(&self) {
        *self.over.lock().unwrap() = true;
        self.ended.notify_all();
    }
}

fn train(options: Options, gradient: &[f32], started: &Barrier, stall: &Stall) {
    let rank = options.rank;
    let mut session = Session::connect(options).unwrap();
    session.open().unwrap();
    started.wait();
    if rank != Rank(0) {
        session.wait_training().unwrap();
    }
    let joined = session.join().unwrap();
    if rank == Rank(0) {
        session.upload(&|_| gradient.to_vec()).unwrap();
        session.wait_training().unwrap();
    }
    let scaler = LossScaler::fixed(1.0).unwrap();
    let pipeline = PipelineOptions::new(scaler, |_| vec![Hyper::default()]);
    let mut pipeline = Pipeline::new(session, &joined, pipeline).unwrap();
    for step in 1..=STEPS {
        pipeline.begin().unwrap();
        pipeline.weights().unwrap().wait(0..ELEMENTS).unwrap();
        let mut assembler = pipeline.assembler(0).unwrap();
        for param in (0..PARAMS).rev() {
            if rank.0 == SLOW && step == STALLS_IN && param == PARAMS / 2 {
                stall.hold();
            }
            assembler.put(param, gradient).unwrap();
        }
        assembler.finish().unwrap();
        pipeline.finish(Vec::new()).unwrap();
    }
    pipeline.close().unwrap().leave().unwrap();
}

#[test]
fn sixteen_ranks_and_a_stalled_one_take_the_memory_that_was_admitted() {
    take_what_was_admitted(TierKind::Memory, ServerOptions::new());
}

/// The chunks of sixteen ranks, in any order, share the few buffers on their way to the drive.
#[test]
fn so_they_do_where_gradients_live_on_a_drive() {
    let root = TempDir::new().expect("a folder for state");
    let options = ServerOptions::new().state_root(root.path()).args(["--spill", "all"]);
    take_what_was_admitted(TierKind::Nvme, options);
}

fn take_what_was_admitted(tier: TierKind, options: ServerOptions) {
    let server = options.start();
    let addresses = [server.address().to_string()];
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let gradient: Arc<Vec<f32>> = Arc::new((0..ELEMENTS).map(|index| (index % 97) as f32 * 1e-3).collect());
    let (started, stalled) = (Barrier::new(RANKS as usize), stall());
    let stall = Stall { begun: AtomicBool::new(false), over: Mutex::new(false), ended: Condvar::new() };
    let most = thread::scope(|scope| {
        for rank in 0..RANKS {
            let options = Options {
                runtime: Some(runtime.handle().clone()),
                deadline: Duration::from_secs(120),
                // Over shared memory the server would map its workers' gradients, which would count as its
                // own resident bytes. The sockets' buffers would then stay untested.
                transport: Transport::Tcp,
                ..Options::new(addresses.to_vec(), spec(tier), Rank(rank))
            };
            let (gradient, started, stall) = (gradient.clone(), &started, &stall);
            scope.spawn(move || train(options, &gradient, started, stall));
        }
        eventually("the slow rank's stall", || stall.begun.load(Ordering::Acquire).then_some(()));
        // Once the server waits for the slow rank alone, the other ranks have pushed all they can.
        let waits = eventually("the server to wait for the slow rank alone", || {
            let waits = job_status(&addresses).servers[0].waiting_for.clone();
            waits.ends_with(&format!("from rank {SLOW}")).then_some(waits)
        });
        eprintln!("during the stall the server waits for {waits}");
        // Nothing is waited for: a server without bounds would grow in this time.
        thread::sleep(stalled);
        let (during, _) = memory_of(server.process.id());
        stall.end();
        during
    });
    let (_, most_ever) = memory_of(server.process.id());
    let admitted = job_status(&addresses).servers[0].memory_bytes;
    eprintln!(
        "admitted {admitted}, resident in the stall {most}, at most {most_ever}: {:.3} of admitted",
        most_ever as f64 / admitted as f64
    );
    assert!(most_ever as f64 <= admitted as f64 * 1.03, "{most_ever} of {admitted} admitted");
}
