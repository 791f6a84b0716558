//! A server dies in the middle of a push that lasts a second: small models on a fast network never show this.

use longshore_tests::{proxy::Proxy, seed::Random, soak, train::Train};

use super::{Bed, in_runs, skipped};

const SERVERS: usize = 3;
const STEPS: u64 = 12;
const KILLS_A_RUN: u64 = 4;
/// Bytes a second towards each server. A micro-step sends it one or two shards of 128 KiB.
const RATE: u64 = 256 << 10;
const SHARD_BYTES: u64 = 128 << 10;

fn survives(tier: &str, job: &[&str], kills: u64) {
    if kills == 0 {
        return skipped();
    }
    let mut random = Random::new();
    let known = Train::new(STEPS).args(job).undisturbed().hash;
    for kills in in_runs(kills, KILLS_A_RUN) {
        assert_eq!(disturbed(tier, job, kills, &mut random), known, "after {kills} kills");
    }
}

fn disturbed(tier: &str, job: &[&str], kills: u64, random: &mut Random) -> String {
    let mut bed = Bed::new(tier, SERVERS);
    let proxies: Vec<Proxy> = bed.servers.iter().map(Proxy::before).collect();
    let addresses: Vec<String> = proxies.iter().map(|proxy| proxy.address().to_string()).collect();
    let train = Train::new(STEPS).args(job).args(["--tier", tier, "--transport", "tcp"]);
    let mut worker = train.allow("waiting for a server").servers(&addresses).start();
    worker.until_steps(1);
    proxies.iter().for_each(|proxy| proxy.slow_to(RATE));
    for _ in 0..kills {
        let victim = random.below(SERVERS as u64) as usize;
        proxies[victim].until_passed(1 + random.below(SHARD_BYTES));
        bed.servers[victim].kill_and_restart();
        // Now and then the next server dies in the same push, while the gradient is resent.
        if random.below(3) > 0 {
            worker.until_steps(1);
        }
    }
    proxies.iter().for_each(|proxy| proxy.slow_to(0));
    worker.finish().end.state_hash
}

#[test]
fn an_exact_nvme_job_survives_kills_in_the_middle_of_a_push() {
    survives("nvme", &[], soak::pick(2, 100));
}

#[test]
fn a_delayed_nvme_job_survives_kills_in_the_middle_of_a_push() {
    survives("nvme", &["--delay", "1", "--warmup-steps", "3"], soak::pick(0, 80));
}

#[test]
fn an_exact_shm_job_survives_kills_in_the_middle_of_a_push() {
    survives("shm", &["--micro-steps", "2"], soak::pick(1, 100));
}
