//! `longshore top` in a terminal: keys, sizes, a server that falls silent, and a terminal that is as it was before.

use std::{fs, process::Command};

use longshore_tests::{
    binaries,
    conformance::cluster::eventually,
    server::{Longshored, ServerOptions},
    skip,
    terminal::{Size, Terminal},
    train::Train,
};

/// More steps than any test waits for: the worker is killed with its test.
const ENDLESS: u64 = 1_000_000;
const SIZE: Size = (30, 100);

fn watch(server: &Longshored) -> Option<Terminal> {
    let mut top = binaries::command("longshore");
    top.args(["top", "--servers", server.address()]);
    let terminal = Terminal::start(&top, SIZE);
    if terminal.is_none() {
        skip::skipped("there is no script: install Debian's packages bsdutils and util-linux");
    }
    terminal
}

/// What is drawn on the last row of a terminal with so many.
fn is_last(text: &str, rows: usize) -> bool {
    text.lines().count() == rows && text.lines().last().is_some_and(|line| line.starts_with("q end"))
}

#[test]
fn it_is_watched_in_a_terminal() {
    let server = ServerOptions::new().start();
    let servers = [server.address().to_string()];
    Train::new(7).args(["--job", "alpha"]).servers(&servers).run();
    let mut worker = Train::new(ENDLESS).args(["--job", "beta"]).servers(&servers).start();
    worker.until_step(3);
    let Some(mut terminal) = watch(&server) else { return };

    // A picture comes in pieces, its last row last.
    terminal.until("the first job", |text| {
        text.contains(" alpha  beta") && text.contains("idle  version 7 (7 applied)") && is_last(text, SIZE.0)
    });
    terminal.keys("\t");
    terminal.until("the next job", |text| text.contains("\ntraining  version "));
    let version = |text: &str| {
        let (_, rest) = text.split_once("training  version ")?;
        rest.split(' ').next()?.parse::<u64>().ok()
    };
    let first = version(&terminal.text()).expect("a version");
    terminal.until("the job to go on", |text| version(text).is_some_and(|version| version > first));

    terminal.keys("?");
    terminal.until("the help", |text| text.contains("scroll the ranks"));
    for size in [(40, 120), (24, 80)] {
        terminal.resize(size);
        terminal.until("the other size", |text| is_last(text, size.0) && text.contains("scroll the ranks"));
        let widest = terminal.text().lines().map(|line| line.chars().count()).max();
        assert!(widest <= Some(size.1), "{}", terminal.text());
    }
    terminal.keys("?");
    terminal.until("the job behind the help", |text| {
        !text.contains("scroll the ranks") && version(text).is_some()
    });

    // A silent server keeps neither the picture nor the keys waiting.
    server.process.stop();
    terminal.until("the silence", |text| text.contains(&servers[0]) && text.contains("does not answer"));
    terminal.keys("?");
    terminal.until("the help beside it", |text| text.contains("scroll the ranks"));
    terminal.keys("\x1b");
    terminal.until("the help to go", |text| !text.contains("scroll the ranks"));
    server.process.go_on();
    terminal.until("the server again", |text| version(text).is_some());

    terminal.keys("q");
    assert_eq!(terminal.ended(), 0);
}

#[test]
fn an_interrupt_gives_the_terminal_back() {
    let server = ServerOptions::new().start();
    let Some(mut terminal) = watch(&server) else { return };
    terminal.until("an empty server", |text| text.contains("no jobs: a worker opens one"));
    terminal.keys("\x03");
    assert_eq!(terminal.ended(), 0);
}

/// Whether a process watches this server.
fn is_watched(server: &Longshored) -> bool {
    let processes = fs::read_dir("/proc").expect("processes");
    let lines = processes.filter_map(|entry| fs::read_to_string(entry.ok()?.path().join("cmdline")).ok());
    let watches = format!("top\0--servers\0{}\0", server.address());
    lines.into_iter().any(|line| line.ends_with(&watches))
}

/// Who ignores SIGHUP, as under `nohup`, is not ended with its terminal.
#[test]
fn a_terminal_that_is_gone_ends_it() {
    let server = ServerOptions::new().start();
    let program = binaries::command("longshore").get_program().to_owned();
    let mut ignoring = Command::new("sh");
    ignoring.args(["-c", "trap \"\" HUP; exec \"$0\" \"$@\""]);
    ignoring.arg(program).args(["top", "--servers", server.address()]);
    let Some(terminal) = Terminal::start(&ignoring, SIZE) else {
        return skip::skipped("there is no script: install Debian's packages bsdutils and util-linux");
    };
    terminal.until("an empty server", |text| text.contains("no jobs: a worker opens one"));
    assert!(is_watched(&server));
    drop(terminal);
    eventually("its end", || (!is_watched(&server)).then_some(()));
}

#[test]
fn a_server_that_is_gone_ends_it_in_order() {
    let mut server = ServerOptions::new().start();
    let Some(mut terminal) = watch(&server) else { return };
    terminal.until("an empty server", |text| text.contains("no jobs: a worker opens one"));
    server.process.kill();
    terminal.until("that it is gone", |text| text.contains(server.address()) && !text.contains("reserved"));
    terminal.keys("q");
    assert_eq!(terminal.ended(), 0);
}
