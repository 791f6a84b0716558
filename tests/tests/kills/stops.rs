//! A process or its network is stopped while a successor takes the rank. Then the process goes on, and must end. The
//! successor stays, and the other rank waits meanwhile. The soak makes 300 stops.

use std::time::{Duration, Instant};

use longshore_tests::{
    proxy::Proxy,
    seed::{Random, spin},
    soak,
    train::{Running, Train},
};

use super::{Bed, in_runs};

const STOPS_A_RUN: u64 = 10;
/// The time that a replaced process has to notice: less than the deadline of its waits, 30 s.
const NOTICE: Duration = Duration::from_secs(25);
/// Bytes a second of a slow network: a chunk of 128 KiB takes 32 s.
const RATE: u64 = 4 << 10;

/// A process of a rank, with its own network to each server.
struct Member {
    running: Running,
    network: Vec<Proxy>,
}

impl Member {
    fn start(bed: &Bed, train: &Train, rank: usize) -> Member {
        let network: Vec<Proxy> = bed.servers.iter().map(Proxy::before).collect();
        let addresses: Vec<String> = network.iter().map(|proxy| proxy.address().to_string()).collect();
        let train = train.clone().servers(&addresses);
        Member { running: train.start_with(["--rank", &rank.to_string()]), network }
    }
}

/// A process is stopped, and another has a slow network. Both end with an error that names their successor's join.
#[test]
fn an_nvme_job_survives_processes_that_wake_after_their_successor() {
    let mut random = Random::new();
    let base = Train::new(40).args(["--world-size", "2"]);
    let known = base.undisturbed();
    // The job goes on while processes start.
    let base = base.endless();
    for stops in in_runs(soak::pick(2, 300), STOPS_A_RUN) {
        let bed = Bed::new("nvme", 2);
        let train = base.clone().args(["--tier", "nvme", "--transport", "tcp"]);
        let train = train.allow("waiting for a server");
        let mut ranks = [0, 1].map(|rank| Member::start(&bed, &train, rank));
        for stop in 0..stops {
            ranks[0].running.until_steps(1 + random.below(10));
            spin(random.part_of(known.step));
            let rank = random.below(2) as usize;
            let is_slow = stop % 2 == 1;
            match is_slow {
                true => ranks[rank].network.iter().for_each(|proxy| proxy.slow_to(RATE)),
                false => ranks[rank].running.process.stop(),
            }
            let begun = Instant::now();
            let new = Member::start(&bed, &train, rank);
            let old = std::mem::replace(&mut ranks[rank], new);
            if is_slow {
                ranks[0].running.until_steps(2);
                assert!(begun.elapsed() < NOTICE, "the successor waited {:?} for a chunk", begun.elapsed());
                old.network.iter().for_each(|proxy| proxy.slow_to(0));
            } else {
                spin(random.part_of(known.startup * 2));
                old.running.process.go_on();
            }
            let (stderr, said) = old.running.fails(NOTICE);
            assert!(stderr.contains("another process has joined"), "{stderr}");
            said.check_steps();
        }
        let [rank0, _rank1] = ranks;
        let end = rank0.running.stop();
        assert_eq!(end.state_hash, base.hash_after(end.version), "after {stops} stops");
    }
}
