//! `kill -9` of servers while their job is paused. A pause lasts until an operator's resume, and the resume
//! lasts too.

use std::{thread, time::Duration};

use longshore_proto::{Dtype, JobSpec, Rank, TierKind};
use longshore_tests::{
    conformance::{
        cluster::{Cluster, DEADLINE, eventually},
        raw::Raw,
        run,
        scenario::{Scale, Scenario},
        synthetic::Synthetic,
    },
    server::{self, ServerOptions},
};
use longshore_wire::v1::Phase;
use longshore_worker::{LossScalerOptions, Options};

const PAUSED_AT: u64 = 3;
const STEPS: u64 = 6;

/// Scale 4, 2, then 1, the floor. "hot" overflows f16 at 1, and does not at 0.5.
fn plan() -> Scenario {
    let options = LossScalerOptions {
        initial: 4.0,
        window: 1000,
        hysteresis: 1,
        consecutive_hysteresis: false,
        min: 1.0,
    };
    Scenario {
        gradient: Dtype::F16,
        image: Dtype::F16,
        scale: Scale::Dynamic(options),
        ..Scenario::exact(STEPS)
    }
}

fn model() -> Synthetic {
    let sizes = vec![("cool", vec![70_003], 0), ("hot", vec![5], 1), ("tail", vec![130_001], 0)];
    Synthetic { sizes, constants: vec![(1, 70_000.0)], ..Synthetic::default() }
}

/// Trains to the end, through a pause that `operate` ends. Returns the final state's hash.
fn train(addresses: Vec<String>, spec: JobSpec, operate: impl FnOnce(&dyn Fn() -> bool)) -> String {
    let (model, plan) = (model(), plan());
    let limits = Options::new(addresses, spec, Rank(0));
    let options = Options { deadline: DEADLINE, slow_deadline: DEADLINE, pause_deadline: DEADLINE, ..limits };
    thread::scope(|scope| {
        let training = scope.spawn(|| {
            let mut pipeline = run::enter(options, &model, &plan);
            run::steps(&mut pipeline, &model, &plan, STEPS, &mut run::Rank::default()).expect("the steps");
            pipeline.drain().expect("a drain");
            pipeline.session().state_hash().expect("a hash").hash
        });
        operate(&|| training.is_finished());
        training.join().expect("the run ends well")
    })
}

fn await_pause(server: &Raw, job: &str) -> String {
    let paused = || {
        let progress = server.find(job).ok()?.progress?;
        (progress.phase() == Phase::Paused).then_some(progress)
    };
    let progress = eventually("a pause", paused);
    assert_eq!(progress.version, PAUSED_AT);
    progress.pause_reason
}

#[test]
fn a_pause_outlives_killed_servers_and_so_does_its_end() {
    let job = "paused";
    let undisturbed = {
        let cluster = Cluster::start(2);
        train(cluster.addresses(), plan().spec(job, &model()), |_| {
            for server in 0..2 {
                await_pause(&cluster.raw(server), job);
            }
            (0..2).for_each(|server| cluster.raw(server).resume(job, PAUSED_AT, 0.5).expect("a resume"));
        })
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let runtime = runtime.expect("a runtime");
    let raw = |address: &str| {
        eventually("a server that listens", || {
            std::net::TcpStream::connect(address).ok()?;
            Some(Raw::connect(runtime.handle().clone(), address.parse().expect("an address")))
        })
    };
    let (drive, tmpfs) = (tempfile::tempdir(), tempfile::tempdir_in("/dev/shm"));
    let (drive, tmpfs) = (drive.expect("a folder"), tmpfs.expect("a folder on a tmpfs"));
    let cases = [
        (TierKind::Nvme, ServerOptions::new().state_root(drive.path())),
        (TierKind::Shm, ServerOptions::new().shm_root(tmpfs.path())),
    ];
    for (tier, options) in cases {
        let mut servers = server::servers(2, &options.allow("job paused"));
        let spec = JobSpec { tier, ..plan().spec(job, &model()) };
        let hash = train(server::addresses(&servers), spec, |is_finished| {
            let reason = await_pause(&raw(servers[0].address()), job);
            await_pause(&raw(servers[1].address()), job);
            servers[0].kill_and_restart();
            assert_eq!(await_pause(&raw(servers[0].address()), job), reason, "the pause is gone");
            thread::sleep(Duration::from_millis(300));
            assert!(!is_finished(), "nobody has ended the pause");
            // A server gets the operator's resume and dies. The other server gets it later.
            raw(servers[1].address()).resume(job, PAUSED_AT, 0.5).expect("a resume");
            servers[1].kill_and_restart();
            let resumed =
                eventually("the second server", || raw(servers[1].address()).find(job).ok()?.progress);
            assert_eq!(resumed.phase(), Phase::Training, "its resume is gone");
            assert!(!is_finished());
            raw(servers[0].address()).resume(job, PAUSED_AT, 0.5).expect("a resume");
        });
        assert_eq!(hash, undisturbed, "{tier}");
    }
}
