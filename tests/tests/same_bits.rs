//! The same job has the same bits however it is spread: over servers, shards, threads and instruction sets.

use longshore_tests::{
    server::{self, ServerOptions},
    status::job_status,
    train::Train,
};

const STEPS: u64 = 50;

/// What the bits must not depend on.
#[derive(Clone, Copy, Debug)]
struct Setup {
    /// 0 embeds the server in the worker.
    servers: usize,
    shard_elements: u64,
    threads: usize,
    isa: Option<&'static str>,
}

const PLAIN: Setup = Setup { servers: 0, shard_elements: 65536, threads: 1, isa: None };

/// Trains to the end and returns the state hash, after comparing it with the one `longshore status` prints.
fn hash(setup: Setup, job: &[&str]) -> String {
    let mut options = ServerOptions::new().threads(setup.threads);
    let shard_elements = setup.shard_elements.to_string();
    let mut train = Train::new(STEPS).args(["--shard-elements", &shard_elements]).args(job);
    if let Some(isa) = setup.isa {
        options = options.isa(isa);
        train = train.env("LONGSHORE_ISA", isa);
    }
    if setup.servers == 0 {
        return train.args(["--threads", &setup.threads.to_string()]).run().end.state_hash;
    }
    let servers = server::servers(setup.servers, &options);
    let addresses = server::addresses(&servers);
    let run = train.servers(&addresses).run();
    let status = job_status(&addresses);
    assert_eq!(status.state_hash.as_deref(), Some(run.end.state_hash.as_str()), "{setup:?}");
    assert_eq!(status.state_version, Some(STEPS), "{setup:?}");
    for server in &status.servers {
        assert_eq!((server.version, server.applied), (STEPS, STEPS), "{setup:?}");
        assert_eq!(server.threads as usize, setup.threads, "the setup must be what runs");
        assert!(setup.isa.is_none_or(|isa| server.isa == isa), "{setup:?}: runs with {}", server.isa);
        assert!(server.pushed_bytes > 0, "{setup:?}: a server that takes no part");
    }
    run.end.state_hash
}

/// Every setup must end with the hash of the first.
fn compare(setups: &[Setup], job: &[&str]) {
    let expected = hash(setups[0], job);
    for &setup in &setups[1..] {
        assert_eq!(hash(setup, job), expected, "{setup:?} against {:?}", setups[0]);
    }
}

#[test]
fn one_rank_has_the_same_bits_on_any_servers() {
    let mut setups = vec![PLAIN];
    for servers in [1, 2, 3] {
        for shard_elements in [65536, 131072] {
            setups.push(Setup { servers, shard_elements, ..PLAIN });
        }
    }
    setups.push(Setup { threads: 2, ..PLAIN });
    setups.push(Setup { servers: 2, threads: 2, ..PLAIN });
    setups.push(Setup { isa: Some("scalar"), ..PLAIN });
    setups.push(Setup { servers: 1, isa: Some("scalar"), ..PLAIN });
    setups.push(Setup { servers: 3, shard_elements: 131072, threads: 2, isa: Some("scalar") });
    compare(&setups, &[]);
}

#[test]
fn two_ranks_have_the_same_bits_on_any_servers() {
    let setups = [PLAIN, Setup { servers: 3, shard_elements: 131072, threads: 2, ..PLAIN }];
    compare(&setups, &["--world-size", "2", "--micro-steps", "2"]);
}

#[test]
fn a_delayed_job_has_the_same_bits_on_any_servers() {
    let setups = [PLAIN, Setup { servers: 2, isa: Some("scalar"), ..PLAIN }];
    compare(&setups, &["--delay", "1", "--warmup-steps", "5"]);
    let newer = ["--delay", "1", "--warmup-steps", "5", "--micro-steps", "3", "--newer-from", "1"];
    compare(&setups, &newer);
}

/// The weights and their rates lie in the server's memory or come through a socket, at stage 3 too.
#[test]
fn a_job_whose_worker_amends_its_weights_has_the_same_bits_on_any_servers() {
    const LOCAL: &[&str] = &["--delay", "1", "--warmup-steps", "5", "--correction", "worker-local"];
    let setups = [
        PLAIN,
        Setup { servers: 3, shard_elements: 131072, threads: 2, ..PLAIN },
        Setup { servers: 2, isa: Some("scalar"), ..PLAIN },
    ];
    compare(&setups, LOCAL);
    let expected = hash(PLAIN, LOCAL);
    for other in [["--transport", "tcp"], ["--transport", "memfd"], ["--stage", "3"]] {
        let servers = Setup { servers: 2, ..PLAIN };
        assert_eq!(hash(servers, &[LOCAL, &other].concat()), expected, "{other:?}");
    }
    let half = ["--gradient-dtype", "f16", "--weight-dtype", "f16"];
    for more in [half, ["--micro-steps", "3", "--accumulate", "worker"]] {
        compare(&setups[..2], &[LOCAL, &more].concat());
    }
}

/// The random numbers of stochastic rounding belong to the element and the step too.
#[test]
fn jobs_in_fewer_bits_have_the_same_bits_on_any_servers() {
    let setups = [
        PLAIN,
        Setup { servers: 3, shard_elements: 131072, threads: 2, ..PLAIN },
        Setup { servers: 2, isa: Some("scalar"), ..PLAIN },
    ];
    compare(&setups, &["--state", "bf16"]);
    compare(&setups, &["--state", "block8", "--master", "bf16", "--delay", "1", "--warmup-steps", "5"]);
}

/// Without this the comparisons above would hold for any hash at all.
#[test]
fn other_jobs_have_other_bits() {
    let jobs = [
        &[][..],
        &["--seed", "2"],
        &["--delay", "1", "--warmup-steps", "5"],
        &["--delay", "1", "--warmup-steps", "5", "--correction", "look-ahead-by-this-rate"],
        &["--delay", "1", "--warmup-steps", "5", "--correction", "compensation=1"],
        &["--delay", "1", "--warmup-steps", "5", "--correction", "none"],
        &["--delay", "1", "--warmup-steps", "5", "--correction", "worker-local"],
        &["--delay", "1", "--warmup-steps", "5", "--correction", "worker-local=1.5"],
        &["--delay", "1", "--warmup-steps", "5", "--micro-steps", "2"],
        &["--delay", "1", "--warmup-steps", "5", "--micro-steps", "2", "--newer-from", "1"],
        &["--micro-steps", "2"],
        &["--micro-steps", "2", "--accumulate", "worker"],
        &["--state", "bf16"],
        &["--state", "block8"],
        &["--master", "bf16"],
    ];
    let hashes = jobs.map(|job| hash(PLAIN, job));
    let distinct: std::collections::BTreeSet<_> = hashes.iter().collect();
    assert_eq!(distinct.len(), jobs.len(), "{hashes:?}");
}
