//! All processes die, the servers keep nothing, and both ranks start with `--resume` at random moments of
//! each other's start.

use longshore_tests::{
    seed::{Random, spin},
    soak,
    train::{Running, Train},
    undisturbed::Undisturbed,
};

use super::Bed;

const STEPS: u64 = 40;
const CHECKPOINT_EVERY: u64 = 4;

fn start_both(train: &Train, random: &mut Random, known: &Undisturbed) -> [Running; 2] {
    let first = random.below(2) as usize;
    let start = |rank: usize| train.start_with(["--resume", "--rank", &rank.to_string()]);
    let one = start(first);
    spin(random.part_of(known.startup * 2));
    let other = start(1 - first);
    if first == 0 { [one, other] } else { [other, one] }
}

/// Kills both ranks with one server or both, again and again, until `kills` servers were killed.
fn survives(kills: u64) {
    let mut random = Random::new();
    let job = ["--world-size", "2"];
    let known = Train::new(STEPS).args(job).undisturbed();
    let mut left = kills;
    while left > 0 {
        let mut bed = Bed::new("memory", 2);
        let train = Train::new(STEPS).args(job).args(["--checkpoint-every", &CHECKPOINT_EVERY.to_string()]);
        let train = train.servers(&bed.addresses());
        let mut ranks = [train.start_with(["--rank", "0"]), train.start_with(["--rank", "1"])];
        ranks[0].until_step(CHECKPOINT_EVERY + 1);
        for _ in 0..4 {
            ranks.iter_mut().for_each(|rank| rank.process.kill());
            let one = random.below(3) as usize;
            for (index, server) in bed.servers.iter_mut().enumerate() {
                // Server `one` lives. If `one` is 2, both servers are killed.
                if one != index {
                    server.kill_and_restart();
                    left = left.saturating_sub(1);
                }
            }
            ranks = start_both(&train, &mut random, &known);
            ranks[0].until_steps(CHECKPOINT_EVERY + random.below(3));
        }
        let [rank0, rank1] = ranks;
        assert_eq!(rank0.finish().end.state_hash, known.hash);
        rank1.done();
    }
}

#[test]
fn ranks_that_resume_at_any_moment_of_each_others_start_go_on() {
    survives(soak::pick(2, 60));
}
