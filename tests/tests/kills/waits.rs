//! Processes wait for one that was killed or is slow, and give up in time with its name. A server of tier `memory`
//! loses its part for good. Workers then say so at once, and name a checkpoint to resume from.

use std::{
    thread,
    time::{Duration, Instant},
};

use longshore_tests::{
    conformance::cluster::eventually, proxy::Proxy, server::ServerOptions, status::job_status, train::Train,
};

use super::Bed;

const STEPS: u64 = 40;
const ENDLESS: u64 = 1_000_000;
const CHECKPOINT_EVERY: u64 = 6;
/// The step at which the server is killed, some steps after a checkpoint.
const KILLED_AT: u64 = 16;
/// `--deadline-s`. `GRACE` is the time until the worker ends after that, since connecting and collecting have deadlines
/// of their own.
const DEADLINE: Duration = Duration::from_secs(3);
const GRACE: Duration = Duration::from_secs(12);

fn train(steps: u64, tier: &str, bed: &Bed) -> Train {
    let train = Train::new(steps).args(["--tier", tier, "--deadline-s", &DEADLINE.as_secs().to_string()]);
    train.allow("waiting for a server").servers(&bed.addresses())
}

/// The error names the server, the job and the step, and the job goes on once the server runs again.
#[test]
fn a_server_that_does_not_come_back_is_named_in_time() {
    let mut bed = Bed::new("nvme", 2);
    let train = train(STEPS, "nvme", &bed);
    let mut worker = train.start();
    worker.until_step(5);
    bed.servers[1].process.kill();
    let (stderr, said) = worker.fails(DEADLINE + GRACE);
    let error = stderr.lines().last().unwrap_or_default();
    // The error names a version's weights, or a step's decision.
    let last = said.last_step();
    let waits = [format!("step {}", last + 1), format!("step {last}"), format!("version {last}")];
    assert!(error.contains(bed.servers[1].address()) && error.contains("job default"), "{stderr}");
    assert!(waits.iter().any(|wait| error.contains(wait)), "none of {waits:?} is named: {stderr}");
    assert!(stderr.contains("waiting for a server"), "{stderr}");
    // Once the server runs again, the job is still there.
    bed.servers[1].restart();
    train.run();
}

/// A server's second connection is idle here: its shards have one chunk each, which all take the first
/// connection. The idle connection must not count as late when the server dies again.
#[test]
fn a_server_that_dies_again_after_the_deadline_is_waited_for_again() {
    let mut bed = Bed::new("nvme", 2);
    let mut worker = train(ENDLESS, "nvme", &bed).start();
    worker.until_step(3);
    for _ in 0..2 {
        let killed = Instant::now();
        bed.servers[1].kill_and_restart();
        worker.until_steps(5);
        while killed.elapsed() < DEADLINE {
            worker.until_steps(1);
        }
    }
    assert!(worker.process.is_running(), "it exited: {}", worker.process.stderr());
    // Server and rank share memory again.
    let rank = || job_status(&bed.addresses()).servers[1].ranks[0].clone();
    assert_eq!((rank().state.as_str(), rank().transport.as_str()), ("joined", "memfd"));
    worker.kill();
    eventually("the killed rank to be shown", || (rank().state == "not connected").then_some(()));
}

/// On a slow network the upload of first weights takes seconds. A server that dies meanwhile forgets the
/// joins, and with the memory tier even the job.
#[test]
fn the_upload_of_first_weights_goes_on_after_a_server_was_killed() {
    let known = Train::new(3).undisturbed().hash;
    for tier in ["nvme", "memory"] {
        let mut bed = Bed::new(tier, 2);
        let proxy = Proxy::before(&bed.servers[1]);
        let addresses = [bed.servers[0].address().to_string(), proxy.address().to_string()];
        proxy.slow_to(1 << 20);
        let train = train(3, tier, &bed).args(["--transport", "tcp", "--deadline-s", "30"]);
        let worker = train.servers(&addresses).start();
        // The upload has half a megabyte, so the kill comes in its middle.
        proxy.until_passed(200 << 10);
        bed.servers[1].kill_and_restart();
        proxy.slow_to(0);
        assert_eq!(worker.finish().end.state_hash, known, "{tier}");
    }
}

/// A rank that is silent past the deadline, as during an evaluation, is waited for while its process lives. Once its
/// process is gone, the wait soon ends with an error that names the rank.
#[test]
fn a_rank_that_is_slow_is_waited_for_past_the_deadline() {
    let known = Train::new(STEPS).args(["--world-size", "2"]).undisturbed();
    let waited_for = |slow: usize| {
        let server = ServerOptions::new().start();
        let train = Train::new(STEPS).args(["--world-size", "2", "--deadline-s", "2"]);
        let train = train.servers(&[server.address().to_string()]);
        let mut ranks = ["0", "1"].map(|rank| train.start_with(["--rank", rank]));
        ranks[0].until_step(5);
        ranks[slow].process.stop();
        // From rank 0 a decision may be missing instead of a gradient.
        let what = if slow == 0 { "step " } else { "shard " };
        let named = [server.address(), what, &format!("from rank {slow}"), "of at most 1800 s"];
        let waits = |said: String| named.iter().all(|word| said.contains(word)).then_some(());
        eventually("a wait past the deadline", || waits(ranks[1 - slow].process.stderr()));
        ranks[slow].process.go_on();
        let [rank0, mut rank1] = ranks;
        assert_eq!(rank0.finish().end.state_hash, known.hash, "rank {slow} was slow");
        assert_eq!(rank1.process.code(), 0, "rank 1 failed: {}", rank1.process.stderr());
    };
    thread::scope(|scope| {
        scope.spawn(|| waited_for(0));
        waited_for(1);
    });
}

/// The error names the rank and the step, with a remedy.
#[test]
fn a_rank_that_does_not_come_back_is_named_in_time() {
    let server = ServerOptions::new().start();
    let train = Train::new(ENDLESS).args(["--world-size", "2", "--deadline-s", "2"]);
    let train = train.servers(&[server.address().to_string()]);
    let mut rank0 = train.start_with(["--rank", "0"]);
    let rank1 = train.start_with(["--rank", "1"]);
    rank0.until_step(5);
    rank1.kill();
    let (stderr, said) = rank0.fails(DEADLINE + GRACE);
    let waiting = format!("step {}", said.last_step() + 1);
    assert!(stderr.contains("rank 1") && stderr.contains(&waiting), "{stderr}");
    assert!(stderr.contains("raise the deadline"), "no remedy: {stderr}");
}

/// The worker ends in time with the server's name and a remedy. A job must never train on a mixture of servers: the
/// same command must not continue it, nor silently start it anew.
#[test]
fn a_job_in_memory_resumes_from_its_checkpoint_after_a_server_was_killed_and_not_without() {
    let job = ["--delay", "1", "--warmup-steps", "5", "--micro-steps", "2", "--accumulate", "worker"];
    let expected = Train::new(STEPS).args(job).undisturbed().hash;
    let mut bed = Bed::new("memory", 2);
    let every = CHECKPOINT_EVERY.to_string();
    let train = train(STEPS, "memory", &bed).args(job).args(["--checkpoint-every", &every]);
    let mut running = train.start();
    running.until_step(KILLED_AT);
    bed.servers[0].process.kill();
    let (stderr, said) = running.fails(DEADLINE + GRACE);
    assert!(stderr.contains(bed.servers[0].address()), "its address is not named: {stderr}");
    assert!(stderr.to_lowercase().contains("check that"), "no remedy: {stderr}");
    said.check_steps();
    bed.servers[0].restart();
    let (stderr, said) = train.start().fails(DEADLINE + GRACE);
    assert!(stderr.contains(bed.servers[0].address()) && stderr.contains("lost the state"), "{stderr}");
    assert_eq!(said.steps().count(), 0);
    let run = train.start_with(["--resume"]).finish();
    // The worker trains on until the kill, so one more checkpoint may be there.
    let newest = KILLED_AT / CHECKPOINT_EVERY * CHECKPOINT_EVERY;
    let right = [newest + 1, newest + CHECKPOINT_EVERY + 1];
    assert!(right.contains(&run.start.first_step), "{:?}, and not at one of {right:?}", run.start);
    assert_eq!(run.end.state_hash, expected);
}
