//! A job has the same bits over any servers, shards, threads and instruction sets.

use std::time::Duration;

use longshore_tests::{
    server::{self, ServerOptions},
    status::job_status,
    train::{Running, Train},
};

const STEPS: u64 = 50;

/// Settings that must not change the bits.
#[derive(Clone, Copy, Debug)]
struct Setup {
    /// 0 embeds the server in the worker.
    servers: usize,
    shard_elements: u64,
    threads: usize,
    isa: Option<&'static str>,
}

const PLAIN: Setup = Setup { servers: 0, shard_elements: 65536, threads: 1, isa: None };

/// Trains to the end. Returns the state hash, after comparing it with the output of `longshore status`.
fn hash(setup: Setup, job: &[&str]) -> String {
    let mut options = ServerOptions::new().args(["--threads", &setup.threads.to_string()]);
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

/// Checks that every setup ends with the hash of the first, and returns it.
fn compare(setups: &[Setup], job: &[&str]) -> String {
    let expected = hash(setups[0], job);
    for &setup in &setups[1..] {
        assert_eq!(hash(setup, job), expected, "{setup:?} against {:?}", setups[0]);
    }
    expected
}

#[test]
fn one_rank_has_the_same_bits_on_any_servers() {
    let setups = [
        PLAIN,
        Setup { isa: Some("scalar"), ..PLAIN },
        Setup { servers: 1, shard_elements: 131072, threads: 2, ..PLAIN },
        Setup { servers: 2, ..PLAIN },
        Setup { servers: 3, shard_elements: 131072, threads: 2, isa: Some("scalar") },
    ];
    compare(&setups, &[]);
}

/// Settings that decide which weights a step reads may change during a job's life. The length of a run may too.
/// The bits then differ from an undisturbed run's, and the run names the settings.
#[test]
fn a_run_that_goes_on_with_other_settings_says_which() {
    const DELAYED: &[&str] = &["--delay", "1", "--warmup-steps", "3"];
    const OTHERS: &[&str] = &["--lr", "0.002", "--clip", "0.5", "--heads", "4"];
    let server = ServerOptions::new().start();
    // No process reaches the end.
    let train = Train::new(1_000_000).args(DELAYED).servers(&[server.address().to_string()]);
    let lives = |train: &Train| {
        let mut running: Running = train.start();
        running.until_steps(4);
        running.process.kill();
        running.process.stderr()
    };
    lives(&train);
    let same = lives(&train);
    assert!(!same.contains("was trained so far"), "{same}");
    let other = lives(&train.clone().args(["--warmup-steps", "2"]));
    let expected = "this job was trained so far with --warmup-steps 3, and goes on with --warmup-steps 2";
    assert!(other.contains(expected), "{other}");
    let none = lives(
        &train
            .clone()
            .args(["--warmup-steps", "2", "--correction", "none", "--steps", "2000000"])
            .args(OTHERS),
    );
    for expected in [
        "--lr 0.003, and goes on with --lr 0.002",
        "--clip 1, and goes on with --clip 0.5",
        "--heads 2, and goes on with --heads 4",
        "--correction look-ahead, and goes on with --correction none",
        "--steps 1000000, and goes on with --steps 2000000",
    ] {
        assert!(none.contains(expected), "{none}");
    }
    assert!(!none.contains("so far with --warmup-steps"), "only what differs is said: {none}");
}

/// Ranks make one gradient together, so their settings must agree.
#[test]
fn a_rank_with_other_settings_than_rank_0s_ends_and_names_them() {
    let server = ServerOptions::new().start();
    let train = Train::new(1_000_000).args(["--world-size", "2"]).servers(&[server.address().to_string()]);
    let _rank_0 = train.start_with(["--rank", "0"]);
    let other = train.clone().args(["--batch", "2"]).start_with(["--rank", "1"]);
    let (stderr, _) = other.fails(Duration::from_secs(30));
    assert!(stderr.contains("rank 0 trains with --batch 4, and rank 1 with --batch 2"), "{stderr}");
}

/// Random numbers of stochastic rounding depend only on the element and the step.
#[test]
fn jobs_in_fewer_bits_have_the_same_bits_on_any_servers() {
    let setups = [
        PLAIN,
        Setup { servers: 3, shard_elements: 131072, threads: 2, ..PLAIN },
        Setup { servers: 2, isa: Some("scalar"), ..PLAIN },
    ];
    let job = ["--state", "block8", "--master", "bf16", "--delay", "1", "--warmup-steps", "5"];
    assert_ne!(compare(&setups, &job), hash(PLAIN, &[]), "a hash of nothing is equal everywhere");
}
