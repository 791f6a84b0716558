//! Planned stops of a server. The server finishes the step in hand, writes and seals a checkpoint, and loses
//! nothing.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use longshore_tests::{
    command::longshore,
    conformance::cluster::eventually,
    peer::{END_HEADERS, HEADERS, Peer, call, frame},
    server::{Longshored, ServerOptions},
    train::Train,
    undecided,
};
use longshore_worker::Pipeline;
use tempfile::TempDir;

const STEPS: u64 = 40;
const DRAINED_AT: u64 = 15;
/// A worker's `--deadline-s` of 3, and some grace.
const DEADLINE: Duration = Duration::from_secs(12);

/// The ways to stop a server.
#[derive(Clone, Copy)]
enum Told {
    Signal,
    Command,
}

fn tell(server: &Longshored, told: Told) {
    match told {
        Told::Signal => server.process.terminate(),
        Told::Command => {
            let output = longshore(["drain", "--servers", server.address()]);
            assert_eq!((output.code, output.stdout.as_str()), (0, "drained\n"), "{output:?}");
        }
    }
}

/// Returns the versions of the job's sealed checkpoints.
fn sealed(folder: &Path, job: &str) -> Vec<u64> {
    let checkpoints = folder.join(job);
    let names = std::fs::read_dir(&checkpoints).expect("the job's checkpoints");
    let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let sealed = names.filter(|name| checkpoints.join(name).join("manifest.json").is_file());
    sealed.map(|name| name.strip_prefix("drain-").expect("a name of a drain").parse().unwrap()).collect()
}

fn drains(job: &[&str], told: Told) {
    let expected = Train::new(STEPS).args(job).undisturbed().hash;
    let checkpoints = TempDir::new().unwrap();
    let mut server =
        ServerOptions::new().checkpoint_dir(checkpoints.path()).args(["--checkpoint-on-drain"]).start();
    let address = server.address().to_string();
    let train =
        Train::new(STEPS).args(job).args(["--deadline-s", "3"]).servers(std::slice::from_ref(&address));
    let mut running = train.start();
    running.until_step(DRAINED_AT);
    tell(&server, told);
    assert_eq!(server.process.code(), 0, "{}", server.process.stderr());

    let (stderr, said) = running.fails(DEADLINE);
    assert!(stderr.contains(&address), "the server is not named: {stderr}");
    assert!(stderr.contains("the server is draining"), "no reason: {stderr}");
    said.check_steps();
    let versions = sealed(checkpoints.path(), "default");
    assert_eq!(versions.len(), 1, "one checkpoint: {versions:?}");
    assert!(versions[0] >= said.last_step(), "step {} was said and is lost: {versions:?}", said.last_step());

    server.restart();
    let run = train.start_with(["--resume"]).finish();
    assert_eq!(run.start.first_step, versions[0] + 1);
    assert_eq!(run.end.state_hash, expected);
}

#[test]
fn a_signal_during_a_delayed_job_of_two_ranks_loses_nothing() {
    let job = ["--delay", "1", "--warmup-steps", "5", "--world-size", "2", "--micro-steps", "2"];
    drains(&job, Told::Signal);
}

#[test]
fn the_command_during_an_exact_job_loses_nothing() {
    drains(&[], Told::Command);
}

#[test]
fn an_empty_server_stops_at_once() {
    for told in [Told::Signal, Told::Command] {
        let mut server = ServerOptions::new().start();
        tell(&server, told);
        assert_eq!(server.process.code(), 0, "{}", server.process.stderr());
        let last = server.log().pop().unwrap_or_default();
        assert_eq!(last["fields"]["message"], "stopped");
    }
}

/// An open call delays the end of a drain by two seconds, which is time for a second signal.
#[test]
fn a_second_signal_stops_at_once() {
    let mut server = ServerOptions::new().allow("told to stop a second time").start();
    let mut peer = Peer::connect(server.address()).unwrap();
    peer.send(&frame(HEADERS, END_HEADERS, 1, &call("/longshore.v1.Tensors/Push"))).unwrap();
    assert!(peer.is_alive());
    tell(&server, Told::Signal);
    eventually("the drain to begin", || server.process.stderr().contains("draining").then_some(()));
    tell(&server, Told::Signal);
    assert_eq!(server.process.code(), 1, "{}", server.process.stderr());
    assert!(server.process.stderr().contains("told to stop a second time"), "{}", server.process.stderr());
}

/// Opens a job whose first step has all gradients and no decision. Its name `a` sorts first, so a drain of one job
/// after the other would begin here.
fn undecided(server: &Longshored) -> Pipeline {
    let pipeline = undecided::undecided(server.address(), "a");
    eventually("the server to wait for the decision", || {
        let status = longshore(["status", "--no-hash", "--job", "a", "--servers", server.address()]);
        status.stdout.contains("waits for the decision on step 1").then_some(())
    });
    pipeline
}

/// A drain that waited for the step would last until its deadline of 30 s.
#[test]
fn a_step_whose_ranks_are_gone_is_not_waited_for() {
    let mut server = ServerOptions::new().start();
    drop(undecided(&server));
    let start = Instant::now();
    tell(&server, Told::Signal);
    assert_eq!(server.process.code(), 0, "{}", server.process.stderr());
    assert!(start.elapsed() < Duration::from_secs(15), "{:?}", start.elapsed());
}

/// While a drain waits for one job's step, other jobs begin no step. Otherwise each new step would prolong
/// the drain.
#[test]
fn all_jobs_finish_the_step_in_hand_at_once() {
    let checkpoints = TempDir::new().unwrap();
    let mut server = ServerOptions::new()
        .checkpoint_dir(checkpoints.path())
        .args(["--checkpoint-on-drain", "--drain-deadline-s", "120"])
        .start();
    let mut waited_for = undecided(&server);
    let other = Train::new(1_000_000).args(["--job", "b", "--deadline-s", "3"]);
    let mut running = other.servers(&[server.address().to_string()]).start();
    running.until_step(5);
    tell(&server, Told::Signal);
    let (stderr, said) = running.fails(DEADLINE);
    assert!(stderr.contains("the server is draining"), "{stderr}");
    assert!(server.process.is_running(), "{}", server.process.stderr());
    waited_for.finish(Vec::new()).unwrap();
    assert_eq!(server.process.code(), 0, "{}", server.process.stderr());
    assert_eq!(sealed(checkpoints.path(), "a"), [1]);
    let last = sealed(checkpoints.path(), "b");
    assert!(last.len() == 1 && (said.last_step()..=said.last_step() + 1).contains(&last[0]), "{last:?}");
}
