//! Trainers stopped by a signal: their end after a failure, and their messages on how to continue.

use std::{fs, path::Path};

use longshore_tests::{
    conformance::cluster::eventually,
    server::ServerOptions,
    status::status,
    train::{Running, Train},
};
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

/// More steps than any test waits for.
const ENDLESS: u64 = 1_000_000;

/// Stops a process, sends two signals, and lets it continue, so that both arrive at once. Returns the exit code and
/// stderr.
fn stopped_twice(mut running: Running) -> (i32, String) {
    running.until_step(3);
    for signal in [Signal::STOP, Signal::TERM, Signal::INT, Signal::CONT] {
        running.process.signal(signal);
    }
    while running.event().is_some() {}
    let code = running.process.code();
    assert!([130, 143].contains(&code), "{code}: {}", running.process.stderr());
    (code, running.process.stderr())
}

/// Returns a run with state in memory, and this folder for checkpoints.
fn in_memory(checkpoints: &Path, ranks: &str) -> Train {
    let flags = ["--checkpoint-dir", &checkpoints.display().to_string(), "--world-size", ranks];
    Train::new(ENDLESS).args(flags)
}

#[test]
fn an_export_that_fails_after_a_signal_is_a_failure() {
    let folder = TempDir::new().unwrap();
    let export = folder.path().join("export");
    for ranks in ["1", "2"] {
        let flags = ["--export", &export.display().to_string(), "--world-size", ranks];
        let mut running = Train::new(ENDLESS).args(flags).start();
        running.until_step(3);
        fs::write(&export, "a file in the way").unwrap();
        running.process.terminate();
        while running.event().is_some() {}
        let (code, stderr) = (running.process.code(), running.process.stderr());
        assert_eq!(code, 1, "{stderr}");
        assert!(stderr.contains("its weights were not exported"), "{stderr}");
        assert!(ranks == "1" || stderr.contains("rank 0 ended with exit status: 1"), "{stderr}");
        fs::remove_file(&export).unwrap();
    }
}

#[test]
fn a_second_signal_says_what_is_left() {
    let folder = TempDir::new().unwrap();
    for ranks in ["1", "2"] {
        let (code, stderr) = stopped_twice(in_memory(folder.path(), ranks).start_with(["--output", "json"]));
        let last = stderr.lines().last().unwrap();
        let error: Value = serde_json::from_str(last).unwrap_or_else(|error| panic!("{error} in {stderr}"));
        assert_eq!(error["error"]["exit_code"], code, "{stderr}");
        let message = error["error"]["message"].as_str().unwrap();
        for word in ["at once", "kept the state in memory", "--resume"] {
            assert!(message.contains(word), "{word:?} is missing: {message}");
        }
    }
    let server = ServerOptions::new().start();
    let running = Train::new(ENDLESS).servers(&[server.address().to_string()]).start();
    let (_, stderr) = stopped_twice(running);
    let last = stderr.lines().last().unwrap();
    assert!(last.contains("the servers hold the job at its last decided step"), "{stderr}");
}

/// No step is in hand while a run waits for a server that is not there.
#[test]
fn a_signal_before_the_first_step_ends_a_run_at_once() {
    let mut running = Train::new(1).servers(&["127.0.0.1:1".to_string()]).start();
    let id = running.process.id();
    eventually("a caught SIGTERM", || {
        let status = fs::read_to_string(format!("/proc/{id}/status")).ok()?;
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"))?;
        let caught = u64::from_str_radix(caught.trim(), 16).ok()?;
        (caught & 1 << (Signal::TERM.as_raw() - 1) != 0).then_some(())
    });
    running.process.terminate();
    let (code, stderr) = (running.process.code(), running.process.stderr());
    assert!(code == 143 && stderr.contains("before its first step"), "{code}: {stderr}");
}

/// The step in hand cannot finish while the job is paused, so a first signal ends the run.
#[test]
fn a_signal_ends_a_run_whose_job_is_paused() {
    let server = ServerOptions::new().allow("job paused").start();
    let servers = [server.address().to_string()];
    // Every step after the first one overflows, down to the smallest loss scale.
    let flags = ["--gradient-dtype", "f16", "--lr", "1e30"];
    let train = Train::new(ENDLESS).args(flags).servers(&servers).allow("the job is paused");
    for ranks in ["1", "2"] {
        let job = format!("of-{ranks}");
        let mut running = train.clone().args(["--job", &job, "--world-size", ranks]).start();
        let is_paused = || status(&servers).iter().any(|of| of.job == job && of.servers[0].phase == "paused");
        eventually("a pause", || is_paused().then_some(()));
        running.process.terminate();
        while running.process.line().is_some() {}
        let (code, stderr) = (running.process.code(), running.process.stderr());
        assert_eq!(code, 143, "{stderr}");
        assert!(stderr.contains("while the job is paused, at once: the servers hold the job"), "{stderr}");
    }
}

/// The run has continued from a checkpoint that its --resume-from names. The same flag would go back there again, so
/// the message names the newest checkpoint instead.
#[test]
fn a_run_that_went_on_from_a_named_checkpoint_names_its_newest() {
    let folder = TempDir::new().unwrap();
    let train = in_memory(folder.path(), "1");
    let stop = |mut running: Running| {
        running.until_steps(3);
        running.process.terminate();
        while running.event().is_some() {}
        assert_eq!(running.process.code(), 143, "{}", running.process.stderr());
        running.process.stderr()
    };
    let said = stop(train.start());
    let name = said.lines().last().unwrap().split_whitespace().last().unwrap().to_string();
    assert!(said.contains(&format!("with --resume to go on from checkpoint {name}")), "{said}");
    let again = stop(train.start_with(["--resume-from", &name]));
    let newest = again.lines().last().unwrap().split_whitespace().last().unwrap();
    assert_ne!(newest, name);
    let words = format!("with --resume-from {newest} instead of {name} to go on from checkpoint {newest}");
    assert!(again.contains(&words), "{again}");
}
