//! A server dies together with a rank other than 0. Where a live server is a version ahead, the live rank 0
//! must bring the servers to one version.

use longshore_tests::{
    seed::{Random, spin},
    soak,
    train::Train,
};

use super::{Bed, in_runs, skipped};

const STEPS: u64 = 60;
const KILLS_A_RUN: u64 = 5;

fn survives(servers: usize, job: &[&str], kills: u64) {
    if kills == 0 {
        return skipped();
    }
    let mut random = Random::new();
    let job = [job, &["--world-size", "2"]].concat();
    let known = Train::new(STEPS).args(&job).undisturbed();
    for kills in in_runs(kills, KILLS_A_RUN) {
        let mut bed = Bed::new("nvme", servers);
        let train = Train::new(STEPS).args(&job).args(["--tier", "nvme"]).allow("waiting for a server");
        let train = train.servers(&bed.addresses());
        let mut rank0 = train.start_with(["--rank", "0"]);
        let mut rank1 = train.start_with(["--rank", "1"]);
        for _ in 0..kills {
            rank0.until_steps(1 + random.below(STEPS / (2 * KILLS_A_RUN)));
            spin(random.part_of(known.step));
            let victim = random.below(servers as u64) as usize;
            bed.servers[victim].process.kill();
            rank1.process.kill();
            bed.servers[victim].restart();
            rank1 = train.start_with(["--rank", "1"]);
        }
        assert_eq!(rank0.finish().end.state_hash, known.hash, "after {kills} kills");
        rank1.done();
    }
}

#[test]
fn an_nvme_job_survives_kills_of_a_server_with_rank_one() {
    survives(3, &[], soak::pick(2, 60));
}

#[test]
fn a_delayed_nvme_job_survives_kills_of_a_server_with_rank_one() {
    survives(2, &["--delay", "1", "--warmup-steps", "5"], soak::pick(0, 40));
}
