//! A trainer whose gradients differ in each process. A repeated step after a step back has other bits, which
//! exposes a rank that has read weights of the first attempt. No undisturbed run exists to compare with, so
//! ranks are compared with each other.

use std::collections::BTreeMap;

use longshore_tests::{
    event::Event,
    seed::Random,
    soak,
    train::{Running, Said, Train},
};

use super::{Bed, in_runs, skipped};

const SERVERS: usize = 3;
const STEPS: u64 = 60;
const KILLS_A_RUN: u64 = 5;

/// By step: the version and checksum of the weights in its last computation.
#[derive(Default)]
struct Read(BTreeMap<u64, (u64, u32)>);

impl Read {
    fn note(&mut self, said: &Said) {
        for event in &said.events {
            if let Event::Weights(weights) = event {
                self.0.insert(weights.step, (weights.version, weights.crc32));
            }
        }
    }
}

/// Rank 0 dies with a server. Another server may then have to take back its last step while rank 1 lives on.
fn agrees(job: &[&str], kills: u64) {
    if kills == 0 {
        return skipped();
    }
    let mut random = Random::new();
    for kills in in_runs(kills, KILLS_A_RUN) {
        let mut bed = Bed::new("nvme", SERVERS);
        let train =
            Train::new(STEPS).args(["--world-size", "2", "--tier", "nvme", "--step-weights"]).args(job);
        let train = train.env("LONGSHORE_TEST_PERTURB", &random.below(1 << 32).to_string());
        let train = train.allow("waiting for a server").servers(&bed.addresses());
        let mut rank0 = train.start_with(["--rank", "0"]);
        let rank1 = train.start_with(["--rank", "1"]);
        let mut read = [Read::default(), Read::default()];
        for _ in 0..kills {
            rank0.until_steps(1 + random.below(STEPS / (2 * KILLS_A_RUN)));
            let victim = random.below(SERVERS as u64) as usize;
            bed.servers[victim].process.kill();
            let again = |old: &mut Running| std::mem::replace(old, train.start_with(["--rank", "0"]));
            rank0.process.kill();
            bed.servers[victim].restart();
            read[0].note(&again(&mut rank0).kill());
        }
        read[0].note(&rank0.finish().said);
        read[1].note(&rank1.done());
        let steps: Vec<u64> = read[1].0.keys().copied().collect();
        assert_eq!(steps, (1..=STEPS).collect::<Vec<u64>>(), "rank 1 lives through all steps");
        for step in steps {
            // A step that a dead process had pushed whole is not repeated.
            let Some(zero) = read[0].0.get(&step) else { continue };
            assert_eq!(*zero, read[1].0[&step], "what rank 0 and rank 1 computed step {step} with");
        }
    }
}

#[test]
fn ranks_compute_with_the_same_weights_after_a_step_was_taken_back() {
    agrees(&[], soak::pick(2, 60));
}

#[test]
fn ranks_of_a_delayed_job_compute_with_the_same_weights_after_a_step_was_taken_back() {
    agrees(&["--delay", "1", "--warmup-steps", "5"], soak::pick(0, 40));
}
