//! `kill -9` of servers of a lasting tier, at random instants. The worker waits, the servers recover by
//! themselves, and the run ends with the bits of an undisturbed run.

use std::time::{Duration, Instant};

use longshore_tests::{
    conformance::cluster::eventually,
    proxy::Proxy,
    seed::{Random, spin},
    server::{self, Longshored, ServerOptions},
    soak,
    status::job_status,
    train::{Running, Train},
    undisturbed::Undisturbed,
};
use tempfile::TempDir;

const STEPS: u64 = 60;
/// Number of kills in one run: few, so that its steps stay few.
const KILLS_A_RUN: u64 = 5;

/// The processes that are killed at once.
#[derive(Clone, Copy, PartialEq)]
enum Victims {
    OneServer,
    BothServers,
    /// Both servers and the worker: no process is left that could resend a gradient.
    All,
}

struct Case {
    tier: &'static str,
    victims: Victims,
    job: &'static [&'static str],
    /// Further flags of the servers.
    server: &'static [&'static str],
}

fn survives(case: &Case) {
    let mut random = Random::new();
    let known = Train::new(STEPS).args(case.job).undisturbed();
    let mut left = soak::pick(4, 75);
    while left > 0 {
        let kills = left.min(KILLS_A_RUN);
        left -= kills;
        let hash = disturbed(case, &mut random, kills, &known);
        assert_eq!(hash, known.hash, "after {kills} kills");
    }
}

/// Makes one run with `kills` kills. Returns its hash.
fn disturbed(case: &Case, random: &mut Random, kills: u64, known: &Undisturbed) -> String {
    let root = if case.tier == "shm" { TempDir::new_in("/dev/shm") } else { TempDir::new() };
    let root = root.expect("a folder for the servers' state");
    let options = ServerOptions::new().allow("a damaged record is replaced").allow("stepping back");
    let options = options.args(case.server);
    let options =
        if case.tier == "shm" { options.shm_root(root.path()) } else { options.state_root(root.path()) };
    let mut servers = server::servers(2, &options);
    let train = Train::new(STEPS).args(case.job).args(["--tier", case.tier]).allow("waiting for a server");
    let train = train.servers(&server::addresses(&servers));
    let mut worker = train.start();
    worker.until_steps(1);
    let mut done = 1;
    for kill in 0..kills {
        let share = (STEPS - done).saturating_sub(2) / (kills - kill);
        // Now and then the kill comes at once, while the server recovers from the last one.
        if random.below(4) > 0 && share > 0 {
            let steps = 1 + random.below(share);
            worker.until_steps(steps);
            done += steps;
            spin(random.part_of(known.step * 2));
        } else {
            spin(random.part_of(known.startup));
        }
        strike(case.victims, random, &mut servers, &mut worker, &train);
        if case.victims == Victims::All {
            // The worker may have decided steps that it had no time to print, and one step may have been
            // taken back.
            done = worker.until_started_at() - 1;
        }
    }
    worker.finish().end.state_hash
}

/// Kills the victims and restarts them with their own commands.
fn strike(
    victims: Victims,
    random: &mut Random,
    servers: &mut [Longshored],
    worker: &mut Running,
    train: &Train,
) {
    let one = random.below(2) as usize;
    let struck = if victims == Victims::OneServer { one..one + 1 } else { 0..2 };
    if victims == Victims::All {
        worker.process.kill();
    }
    for server in &mut servers[struck.clone()] {
        server.process.kill();
    }
    for server in &mut servers[struck] {
        server.restart();
    }
    if victims == Victims::All {
        let again = train.start();
        std::mem::replace(worker, again).kill().check_steps();
    }
}

/// DRAM holds two of a server's two or three images. Gradients are on the drives too, except lent ones.
const ON_DRIVES: &[&str] = &["--spill", "all", "--storage-buffers", "2"];
const DELAYED: &[&str] = &["--delay", "1", "--warmup-steps", "5"];

#[test]
fn a_server_that_does_not_come_back_is_named_in_time() {
    let root = TempDir::new().expect("a folder for the servers' state");
    let options = ServerOptions::new().state_root(root.path()).allow("stepping back");
    let mut servers = server::servers(2, &options);
    let addresses = server::addresses(&servers);
    let train = Train::new(STEPS).args(["--tier", "nvme", "--deadline-s", "2"]).servers(&addresses);
    let mut worker = train.start();
    worker.until_step(5);
    servers[1].process.kill();
    let (stderr, said) = worker.fails(Duration::from_secs(15));
    let error = stderr.lines().last().unwrap_or_default();
    // The error names a version's weights, or a step's decision.
    let last = said.last_step();
    let waits = [format!("step {}", last + 1), format!("step {last}"), format!("version {last}")];
    assert!(error.contains(&addresses[1]) && error.contains("job default"), "{stderr}");
    assert!(waits.iter().any(|wait| error.contains(wait)), "none of {waits:?} is named: {stderr}");
    assert!(stderr.contains("waiting for a server"), "{stderr}");
    // The job is still there once the server runs.
    servers[1].restart();
    train.allow("waiting for a server").run();
}

/// A server's second connection is idle here: its shards have one chunk each, which all take the first
/// connection. The idle connection must not count as late when the server dies again.
#[test]
fn a_server_that_dies_again_after_the_deadline_is_waited_for_again() {
    const DEADLINE: Duration = Duration::from_secs(3);
    let root = TempDir::new().expect("a folder for the servers' state");
    let mut servers = server::servers(2, &ServerOptions::new().state_root(root.path()));
    let deadline = DEADLINE.as_secs().to_string();
    let train = Train::new(1_000_000).args(["--tier", "nvme", "--deadline-s", &deadline]);
    let mut worker = train.servers(&server::addresses(&servers)).start();
    worker.until_step(3);
    for _ in 0..2 {
        let killed = Instant::now();
        servers[1].kill_and_restart();
        worker.until_steps(5);
        while killed.elapsed() < DEADLINE {
            worker.until_steps(1);
        }
    }
    assert!(worker.process.is_running(), "it exited: {}", worker.process.stderr());
    worker.kill();
}

#[test]
fn a_server_that_restarted_shares_memory_again() {
    let root = TempDir::new().expect("a folder for the server's state");
    let mut servers = server::servers(1, &ServerOptions::new().state_root(root.path()));
    let addresses = server::addresses(&servers);
    let train = Train::new(1_000_000).args(["--tier", "nvme"]).allow("waiting for a server");
    let mut worker = train.servers(&addresses).start();
    let rank = || job_status(&addresses).servers[0].ranks[0].clone();
    worker.until_step(3);
    assert_eq!(rank().transport, "memfd");
    servers[0].process.kill();
    servers[0].restart();
    worker.until_steps(5);
    assert_eq!((rank().state.as_str(), rank().transport.as_str()), ("joined", "memfd"));
    worker.kill();
    eventually("the killed rank to be shown", || (rank().state == "not connected").then_some(()));
}

/// A worker was stopped and replaced. The worker resumes when its successor and its server have died, and is
/// the first to reach the next server.
#[test]
fn a_replaced_worker_is_fenced_by_a_server_that_restarted() {
    for tier in ["nvme", "shm"] {
        let root = if tier == "shm" { TempDir::new_in("/dev/shm") } else { TempDir::new() };
        let root = root.expect("a folder for the server's state");
        let options = ServerOptions::new();
        let options =
            if tier == "shm" { options.shm_root(root.path()) } else { options.state_root(root.path()) };
        let mut servers = server::servers(1, &options);
        let train = Train::new(1_000_000).args(["--tier", tier, "--transport", "tcp"]);
        let train = train.allow("waiting for a server").servers(&server::addresses(&servers));
        let mut old = train.start();
        old.until_step(5);
        old.process.stop();
        let mut new = train.start();
        new.until_steps(3);
        new.kill();
        servers[0].kill_and_restart();
        old.process.go_on();
        // Depending on its stop, the worker first sees the fence or the loss of its weights.
        old.fails(Duration::from_secs(30));
        let joined = |line: &serde_json::Value| line.to_string().contains("rank joined");
        assert!(!servers[0].log().iter().any(joined), "it took the rank again: {:?}", servers[0].log());
        let mut next = train.start();
        next.until_steps(3);
        next.kill();
    }
}

#[test]
fn an_exact_nvme_job_survives_kills_of_either_server() {
    survives(&Case { tier: "nvme", victims: Victims::OneServer, job: &[], server: &[] });
}

#[test]
fn a_delayed_nvme_job_survives_kills_of_both_servers() {
    survives(&Case { tier: "nvme", victims: Victims::BothServers, job: DELAYED, server: &[] });
}

#[test]
fn an_exact_nvme_job_with_lent_gradients_and_all_else_on_drives_survives_kills_of_either_server() {
    survives(&Case { tier: "nvme", victims: Victims::OneServer, job: &[], server: ON_DRIVES });
}

#[test]
fn a_delayed_nvme_job_with_lent_gradients_and_all_else_on_drives_survives_kills_of_everything() {
    survives(&Case { tier: "nvme", victims: Victims::All, job: DELAYED, server: ON_DRIVES });
}

#[test]
fn an_nvme_job_with_all_on_drives_survives_kills_of_either_server() {
    let job = &["--transport", "tcp", "--micro-steps", "2"];
    survives(&Case { tier: "nvme", victims: Victims::OneServer, job, server: ON_DRIVES });
}

#[test]
fn a_delayed_nvme_job_with_all_on_drives_survives_kills_of_everything() {
    let job = &["--transport", "tcp", "--delay", "1", "--warmup-steps", "5"];
    survives(&Case { tier: "nvme", victims: Victims::All, job, server: ON_DRIVES });
}

#[test]
fn an_nvme_job_survives_kills_of_everything() {
    survives(&Case { tier: "nvme", victims: Victims::All, job: &["--micro-steps", "2"], server: &[] });
}

#[test]
fn an_exact_shm_job_survives_kills_of_either_server() {
    survives(&Case { tier: "shm", victims: Victims::OneServer, job: &["--micro-steps", "2"], server: &[] });
}

#[test]
fn a_shm_job_survives_kills_of_everything() {
    survives(&Case { tier: "shm", victims: Victims::All, job: &[], server: &[] });
}

#[test]
fn a_delayed_shm_job_survives_kills_of_both_servers() {
    survives(&Case { tier: "shm", victims: Victims::BothServers, job: DELAYED, server: &[] });
}

/// On a slow network the upload of first weights takes seconds. A server that dies meanwhile forgets the
/// joins, and with the memory tier even the job.
fn upload_survives(tier: &str) {
    let known = Train::new(3).undisturbed().hash;
    let root = TempDir::new().expect("a folder for the servers' state");
    let mut servers = server::servers(2, &ServerOptions::new().state_root(root.path()));
    let proxy = Proxy::before(&servers[1]);
    let addresses = [servers[0].address().to_string(), proxy.address().to_string()];
    proxy.slow_to(1 << 20);
    let train = Train::new(3).args(["--tier", tier, "--transport", "tcp"]).allow("waiting for a server");
    let worker = train.servers(&addresses).start();
    // The upload has half a megabyte.
    proxy.until_passed(200 << 10);
    servers[1].kill_and_restart();
    proxy.slow_to(0);
    assert_eq!(worker.finish().end.state_hash, known);
}

#[test]
fn the_upload_of_first_weights_goes_on_after_a_server_was_killed() {
    upload_survives("nvme");
}

#[test]
fn the_upload_to_servers_that_keep_nothing_goes_on_after_one_was_killed() {
    upload_survives("memory");
}
