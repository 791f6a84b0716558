//! `kill -9` of a server with the memory tier. The worker names the loss and the remedy at once. The job
//! continues from the last checkpoint to the bits of an undisturbed run.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use longshore_tests::{
    server::{self, Longshored, ServerOptions},
    train::{Running, Train},
};
use tempfile::TempDir;

const STEPS: u64 = 40;
const CHECKPOINT_EVERY: u64 = 6;
/// The step at which the server is killed, some steps after a checkpoint.
const KILLED_AT: u64 = 16;
/// `--deadline-s`, and the grace until the worker ends: connecting and collecting have their own.
const DEADLINE: Duration = Duration::from_secs(3);
const GRACE: Duration = Duration::from_secs(8);

fn train(job: &[&str]) -> Train {
    Train::new(STEPS).args(job)
}

fn checkpointing(job: &[&str], addresses: &[String]) -> Train {
    let every = CHECKPOINT_EVERY.to_string();
    let deadline = DEADLINE.as_secs().to_string();
    train(job).args(["--checkpoint-every", &every, "--deadline-s", &deadline]).servers(addresses)
}

fn options(checkpoints: &Path) -> ServerOptions {
    ServerOptions::new().checkpoint_dir(checkpoints)
}

/// Checks that a worker ends in time after its server `killed` died, with the server's address and a remedy.
fn fails_clearly(mut running: Running, servers: &mut [Longshored], killed: usize) {
    running.until_step(KILLED_AT);
    let begun = Instant::now();
    servers[killed].process.kill();
    let (stderr, said) = running.fails(DEADLINE + GRACE);
    let address = servers[killed].address();
    assert!(stderr.contains(address), "{address} is not named after {:?}: {stderr}", begun.elapsed());
    assert!(stderr.to_lowercase().contains("check that"), "no remedy: {stderr}");
    said.check_steps();
}

/// Runs until a server dies, restarts it, and resumes on `resumed_on` servers.
fn resumes(job: &[&str], count: usize, killed: usize) {
    let expected = train(job).undisturbed().hash;
    let checkpoints = TempDir::new().unwrap();
    let mut servers = server::servers(count, &options(checkpoints.path()));
    let train = checkpointing(job, &server::addresses(&servers));
    fails_clearly(train.start(), &mut servers, killed);
    servers[killed].restart();
    let run = train.start_with(["--resume"]).finish();
    check_resumed(run.start.first_step);
    assert_eq!(run.end.state_hash, expected);
}

/// Checks that a run resumes from the newest checkpoint before the kill, or a later one: the worker trains on
/// during the kill.
fn check_resumed(first_step: u64) {
    let newest = KILLED_AT / CHECKPOINT_EVERY * CHECKPOINT_EVERY;
    let right = [newest + 1, newest + CHECKPOINT_EVERY + 1];
    assert!(right.contains(&first_step), "resumed at step {first_step}, and not at one of {right:?}");
}

#[test]
fn a_job_resumes_after_one_of_its_two_servers_was_killed() {
    resumes(&[], 2, 1);
}

#[test]
fn a_delayed_job_resumes_after_one_of_its_two_servers_was_killed() {
    resumes(&["--delay", "1", "--warmup-steps", "5", "--micro-steps", "2", "--accumulate", "worker"], 2, 0);
}

/// The checkpoint has the image that the next delayed step reads.
#[test]
fn a_job_without_a_correction_resumes_after_it_was_killed() {
    resumes(&["--delay", "1", "--warmup-steps", "5", "--correction", "none"], 1, 0);
}

/// Moves from one server to three, and a delayed job from three to one.
fn moves(job: &[&str], from: usize, to: usize) {
    let expected = train(job).undisturbed().hash;
    let checkpoints = TempDir::new().unwrap();
    let mut servers = server::servers(from, &options(checkpoints.path()));
    fails_clearly(checkpointing(job, &server::addresses(&servers)).start(), &mut servers, 0);
    drop(servers);
    let servers = server::servers(to, &options(checkpoints.path()));
    let run = checkpointing(job, &server::addresses(&servers)).start_with(["--resume"]).finish();
    check_resumed(run.start.first_step);
    assert_eq!(run.end.state_hash, expected);
}

#[test]
fn an_exact_job_resumes_on_more_servers() {
    moves(&[], 1, 3);
}

#[test]
fn a_delayed_job_resumes_on_fewer_servers() {
    moves(&["--delay", "1", "--warmup-steps", "5"], 3, 1);
}

#[test]
fn a_server_that_comes_back_empty_is_told_from_one_that_is_gone() {
    let checkpoints = TempDir::new().unwrap();
    let mut servers = server::servers(1, &options(checkpoints.path()));
    let addresses = server::addresses(&servers);
    let mut running = train(&[]).servers(&addresses).start();
    running.until_step(KILLED_AT);
    servers[0].kill_and_restart();
    let (stderr, _) = running.fails(DEADLINE + GRACE);
    assert!(stderr.contains(&addresses[0]) && stderr.contains("lost the state of job"), "{stderr}");
    assert!(stderr.contains("Restore the last checkpoint"), "no remedy: {stderr}");
}

/// A job must never train on a mixture of servers: the same command must not continue it, nor silently start
/// it anew.
#[test]
fn a_job_that_lost_a_part_is_not_continued_without_resume() {
    let checkpoints = TempDir::new().unwrap();
    let mut servers = server::servers(2, &options(checkpoints.path()));
    let train = checkpointing(&[], &server::addresses(&servers));
    fails_clearly(train.start(), &mut servers, 1);
    servers[1].restart();
    let (stderr, said) = train.start().fails(DEADLINE + GRACE);
    assert!(stderr.contains(servers[1].address()) && stderr.contains("lost the state"), "{stderr}");
    assert_eq!(said.steps().count(), 0);
}

#[test]
fn resuming_without_a_checkpoint_says_so() {
    let checkpoints = TempDir::new().unwrap();
    let server = options(checkpoints.path()).start();
    let train = train(&[]).servers(&[server.address().to_string()]);
    let (stderr, _) = train.start_with(["--resume"]).fails(GRACE);
    assert!(stderr.contains("no checkpoint to resume from: leave --resume out"), "{stderr}");
    train.run();
}
