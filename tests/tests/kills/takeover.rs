//! A rank 0 that seems dead and is not. Its network to the servers stops while another process takes its
//! place, and resumes at a random moment. The new process is killed early, the old one late.

use std::time::Duration;

use longshore_tests::{
    proxy::Proxy,
    seed::{Random, spin},
    soak,
    train::Train,
    undisturbed::Undisturbed,
};

use super::{Bed, in_runs, skipped};

const SERVERS: usize = 3;
const STEPS: u64 = 300;
const ROUNDS_A_RUN: u64 = 5;
/// The time that a replaced process has to notice.
const NOTICE: Duration = Duration::from_secs(45);

/// The longest delay of a worker's bytes to a server. A decision or a new process's first message then
/// reaches servers far apart, up to a good part of a step.
const LAG: Duration = Duration::from_millis(30);

fn survives(tier: &str, job: &[&str], kills: u64) {
    if kills == 0 {
        return skipped();
    }
    let mut random = Random::new();
    let known = Train::new(STEPS).args(job).undisturbed();
    // Each round kills two processes.
    for rounds in in_runs(kills / 2, ROUNDS_A_RUN) {
        let bed = Bed::new(tier, SERVERS);
        let train = Train::new(STEPS).args(job).args(["--tier", tier, "--transport", "tcp"]);
        let train = train.allow("waiting for a server").servers(&bed.addresses());
        for _ in 0..rounds {
            replace(&bed, job, tier, &mut random, &known);
        }
        assert_eq!(train.run().end.state_hash, known.hash, "after {rounds} rounds");
    }
}

/// Replaces rank 0 once, and leaves no worker running.
fn replace(bed: &Bed, job: &[&str], tier: &str, random: &mut Random, known: &Undisturbed) {
    let (far, near) = (Network::of(bed, random), Network::of(bed, random));
    let train = |network: &Network| {
        let train = Train::new(STEPS).args(job).args(["--tier", tier, "--transport", "tcp"]);
        train.allow("waiting for a server").servers(&network.addresses())
    };
    let mut old = train(&far).start();
    old.until_steps(1 + random.below(4));
    spin(random.part_of(known.step + LAG));
    far.0.iter().for_each(Proxy::stop);
    let early = train(&near).start();
    spin(random.part_of(known.startup));
    early.kill().check_steps();
    let mut new = train(&near).start();
    spin(random.part_of(known.startup));
    // Each server receives the old process's bytes at another time.
    for proxy in &far.0 {
        proxy.go_on();
        spin(random.part_of(LAG));
    }
    new.until_steps(1);
    let (stderr, said) = old.fails(NOTICE);
    assert!(stderr.contains("another process has joined"), "{stderr}");
    said.check_steps();
    new.kill().check_steps();
}

/// A process's connections to all servers.
struct Network(Vec<Proxy>);

impl Network {
    fn of(bed: &Bed, random: &mut Random) -> Network {
        let proxies = bed.servers.iter().map(Proxy::before);
        Network(proxies.inspect(|proxy| proxy.lag(random.part_of(LAG))).collect())
    }

    fn addresses(&self) -> Vec<String> {
        self.0.iter().map(|proxy| proxy.address().to_string()).collect()
    }
}

#[test]
fn an_nvme_job_survives_a_rank_zero_that_comes_back() {
    survives("nvme", &[], soak::pick(0, 100));
}

#[test]
fn a_shm_job_survives_a_rank_zero_that_comes_back() {
    survives("shm", &["--micro-steps", "2"], soak::pick(0, 100));
}

#[test]
fn a_delayed_job_in_memory_survives_a_rank_zero_that_comes_back() {
    survives("memory", &["--delay", "1", "--warmup-steps", "5"], soak::pick(2, 100));
}
