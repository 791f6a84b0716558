//! Shards have two holders: a server that is lost for good takes no step with it, and the weights are those of an
//! undisturbed run.

use std::time::Duration;

use longshore_tests::{
    command::{Output, longshore},
    seed::{Random, spin},
    server::{self, Longshored, ServerOptions},
    soak,
    status::job_status,
    train::{Run, Running, Train},
};

const STEPS: u64 = 150;

fn replicated(steps: u64, ranks: usize, more: &[&str]) -> Train {
    let train = Train::new(steps).args(["--layers", "3", "--world-size", &ranks.to_string()]);
    train.args(more).allow("waiting for a server").allow("given up as lost")
}

fn start(train: &Train, ranks: usize) -> Vec<Running> {
    train.clone().args(["--replicas", "2"]).start_ranks(ranks)
}

/// The hash of the same training without replicas, on one server.
fn undisturbed(train: &Train, ranks: usize) -> String {
    if ranks == 1 {
        return train.undisturbed().hash;
    }
    let alone = server::servers(1, &ServerOptions::new());
    let train = train.clone().servers(&server::addresses(&alone));
    Run::of_ranks(train.start_ranks(ranks)).end.state_hash
}

fn give_up(living: &Longshored, lost: &str, more: &[&str]) -> Output {
    let asked = ["scale", "--job", "default", "--servers", living.address(), "--lost", lost];
    longshore([&asked[..], more].concat())
}

fn survives(ranks: usize, count: usize, more: &[&str]) {
    let train = replicated(STEPS, ranks, more);
    let expected = undisturbed(&train, ranks);
    let mut random = Random::new();
    let mut servers = server::servers(count, &ServerOptions::new());
    let addresses = server::addresses(&servers);
    let mut running = start(&train.clone().servers(&addresses), ranks);
    running[0].until_step(3 + random.below(20));
    spin(random.part_of(Duration::from_millis(50)));
    let lost = servers.remove(random.below(count as u64) as usize);
    let address = lost.address().to_string();
    drop(lost);
    let said = give_up(&servers[0], &address, &["--wait"]);
    assert_eq!(said.code, 0, "{said:?}");
    running[0].until_steps(5);
    let living = server::addresses(&servers);
    assert_eq!(job_status(&living).servers.len(), count - 1);
    assert_eq!(Run::of_ranks(running).end.state_hash, expected);
}

/// Servers are lost one after the other, some with a rank of their host, and a new one takes the place of each.
fn wears_out(losses: u64, more: &[&str]) {
    const A_RUN: u64 = 10;
    let steps = soak::pick(300, 2500);
    let train = replicated(steps, 2, more);
    let expected = undisturbed(&train, 2);
    let mut random = Random::new();
    for run in 0..losses.div_ceil(A_RUN) {
        let mut servers = server::servers(3, &ServerOptions::new());
        let mut running = start(&train.clone().servers(&server::addresses(&servers)), 2);
        for _ in 0..A_RUN.min(losses - run * A_RUN) {
            running[0].until_steps(1 + random.below(10));
            spin(random.part_of(Duration::from_millis(50)));
            let lost = servers.remove(random.below(3) as usize);
            let address = lost.address().to_string();
            let new = ServerOptions::new().start();
            let rank = random.below(4) as usize;
            drop(lost);
            if rank < 2 {
                drop(running.remove(rank).kill());
            }
            let said = give_up(&servers[0], &address, &["--add", new.address()]);
            assert_eq!(said.code, 0, "{said:?}");
            servers.push(new);
            if rank < 2 {
                let train = train.clone().servers(&server::addresses(&servers[..2]));
                running
                    .insert(rank, train.args(["--replicas", "2"]).start_with(["--rank", &rank.to_string()]));
            }
            // Fulfilled once every shard has two holders again.
            let living = server::addresses(&servers).join(",");
            let wish =
                ["scale", "--job", "default", "--servers", servers[0].address(), "--to", &living, "--wait"];
            let said = longshore(wish);
            assert_eq!(said.code, 0, "{said:?}");
        }
        assert_eq!(Run::of_ranks(running).end.state_hash, expected);
    }
}

#[test]
fn servers_are_lost_one_after_the_other() {
    wears_out(soak::pick(3, 50), &[]);
}

#[test]
fn servers_of_a_delayed_job_are_lost_one_after_the_other() {
    wears_out(soak::pick(3, 50), &["--delay", "1", "--warmup-steps", "5"]);
}

/// A wish moves owners and replicas, and drops the replicas where one server is left.
#[test]
fn servers_of_a_replicated_job_come_and_go() {
    let train = replicated(STEPS, 1, &[]);
    let expected = undisturbed(&train, 1);
    let servers = server::servers(4, &ServerOptions::new());
    let addresses = server::addresses(&servers);
    let mut running = start(&train.clone().servers(&addresses[..2]), 1);
    running[0].until_step(3);
    for to in [&addresses[..4], &addresses[1..4], &addresses[2..3], &addresses[..2]] {
        let wish =
            ["scale", "--job", "default", "--servers", &addresses.join(","), "--to", &to.join(","), "--wait"];
        let said = longshore(wish);
        assert_eq!(said.code, 0, "{said:?}");
        assert_eq!(job_status(to).servers.len(), to.len());
    }
    assert_eq!(Run::of_ranks(running).end.state_hash, expected);
}

#[test]
fn a_lost_server_takes_no_step_with_it() {
    survives(1, 3, &[]);
}

#[test]
fn two_ranks_outlive_one_of_two_servers() {
    survives(2, 2, &[]);
}

#[test]
fn a_delayed_job_outlives_a_server() {
    survives(2, 3, &["--delay", "1", "--warmup-steps", "5"]);
}
