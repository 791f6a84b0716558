//! `kill -9` of a server together with one of two ranks, while the other rank lives on. Steps that the other
//! servers decided without the dead one are taken back. The living rank must resend its gradients, and
//! recompute all later steps.

use std::thread;

use longshore_tests::{
    seed::{Random, spin},
    server::{self, Longshored, ServerOptions},
    soak,
    train::{Running, Train},
};
use tempfile::TempDir;

const STEPS: u64 = 60;
/// Number of kills in one run: few, so that its steps stay few.
const KILLS_A_RUN: u64 = 5;
const DELAYED: &[&str] = &["--delay", "1", "--warmup-steps", "5"];
const MICRO_STEPS: &[&str] = &["--delay", "1", "--warmup-steps", "5", "--micro-steps", "2"];

fn start(rank: usize, job: &[&str], addresses: &[String]) -> Running {
    let train = Train::new(STEPS).args(job).args(["--tier", "nvme"]).allow("waiting for a server");
    train.servers(addresses).start_with(["--rank", &rank.to_string()])
}

fn survives_without(killed: usize, count: usize, job: &[&str]) {
    let mut random = Random::new();
    let job = [job, &["--world-size", "2"]].concat();
    let known = Train::new(STEPS).args(&job).undisturbed();
    let (mut left, mut taken_back) = (soak::pick(4, 75), 0);
    while left > 0 {
        let kills = left.min(KILLS_A_RUN);
        left -= kills;
        let root = TempDir::new().expect("a folder for the servers' state");
        let options = ServerOptions::new().state_root(root.path());
        let options = options.allow("a damaged record is replaced").allow("stepping back");
        let mut servers = server::servers(count, &options);
        let addresses = server::addresses(&servers);
        let start = |rank| start(rank, &job, &addresses);
        let mut ranks = [start(0), start(1)];
        let mut done = ranks[0].until_started_at() - 1;
        for kill in 0..kills {
            let share = (STEPS - done).saturating_sub(2) / (kills - kill);
            let steps = 1 + random.below(share.max(1));
            ranks[0].until_steps(steps);
            done += steps;
            // In three of four kills both die right after the step: the step is then decided everywhere, and
            // perhaps durable on one server.
            if random.below(4) == 0 {
                spin(random.part_of(known.step));
            }
            let victim = random.below(count as u64) as usize;
            servers[victim].process.kill();
            ranks[killed].process.kill();
            taken_back += times_stepped_back(&servers[victim]);
            servers[victim].restart();
            std::mem::replace(&mut ranks[killed], start(killed)).kill().check_steps();
            if killed == 0 {
                done = ranks[0].until_started_at() - 1;
            }
        }
        let [rank0, rank1] = ranks;
        let mut rank1 = Other(rank1);
        let end = rank0.finish().end;
        assert_eq!(rank1.0.process.code(), 0, "rank 1 failed");
        assert_eq!(end.state_hash, known.hash, "after {kills} kills");
        taken_back += servers.iter().map(times_stepped_back).sum::<usize>();
    }
    eprintln!("a step was taken back {taken_back} times");
}

/// A rank whose output is printed if the test fails: the rank that fails first may fail because of this one.
struct Other(Running);

impl Drop for Other {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("rank 1 said: {}", self.0.process.stderr());
        }
    }
}

fn times_stepped_back(server: &Longshored) -> usize {
    let message = |line: &serde_json::Value| line.to_string().contains("stepping back");
    server.log().iter().filter(|line| message(line)).count()
}

#[test]
fn a_delayed_nvme_job_survives_kills_of_rank_zero_with_a_server() {
    survives_without(0, 2, DELAYED);
}

#[test]
fn an_nvme_job_on_three_servers_survives_kills_of_rank_zero_with_a_server() {
    survives_without(0, 3, &[]);
}

#[test]
fn an_nvme_job_survives_kills_of_rank_one_with_a_server() {
    survives_without(1, 2, &[]);
}

#[test]
fn a_delayed_nvme_job_of_two_micro_steps_survives_kills_of_rank_one_with_a_server() {
    survives_without(1, 3, MICRO_STEPS);
}

/// The last step is decided everywhere when a rank dies with a server that had not stored it. The other rank
/// has no more steps, and must still take the step back instead of waiting for the dead server's part.
#[test]
fn the_last_step_survives_kills_of_rank_one_with_a_server() {
    let job = [MICRO_STEPS, &["--world-size", "2"]].concat();
    let known = Train::new(STEPS).args(&job).undisturbed();
    for victim in [2, 0] {
        let root = TempDir::new().expect("a folder for the servers' state");
        let options = ServerOptions::new().state_root(root.path()).allow("stepping back");
        let mut servers = server::servers(3, &options);
        let addresses = server::addresses(&servers);
        let start = |rank| start(rank, &job, &addresses);
        let [mut rank0, mut rank1] = [start(0), start(1)];
        rank0.until_step(STEPS);
        servers[victim].process.kill();
        rank1.process.kill();
        servers[victim].restart();
        let again = start(1);
        assert_eq!(rank0.finish().end.state_hash, known.hash, "server {victim} was killed");
        again.done();
    }
}
