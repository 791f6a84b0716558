//! `longshore top` in a terminal: keys, a silent server, and a terminal restored at the end.

use std::{fs, process::Command};

use longshore_tests::{
    binaries,
    conformance::cluster::eventually,
    server::{Longshored, ServerOptions},
    skip,
    terminal::Terminal,
    train::Train,
};

const EMPTY: &str = "no jobs: a worker opens one";
const HELP: &str = "scroll the ranks";

fn start(top: &Command) -> Option<Terminal> {
    let terminal = Terminal::start(top);
    if terminal.is_none() {
        skip::skipped("there is no script: install Debian's packages bsdutils and util-linux");
    }
    terminal
}

fn watch(server: &Longshored) -> Option<Terminal> {
    let mut top = binaries::command("longshore");
    top.args(["top", "--servers", server.address()]);
    start(&top)
}

#[test]
fn it_is_watched_in_a_terminal() {
    let server = ServerOptions::new().start();
    let servers = [server.address().to_string()];
    Train::new(7).args(["--job", "alpha"]).servers(&servers).run();
    let Some(mut terminal) = watch(&server) else { return };
    terminal.until("idle  version 7 (7 applied)");
    terminal.keys("?");
    terminal.until(HELP);
    terminal.keys("q");
    assert_eq!(terminal.ended(), 0);
}

#[test]
fn a_silent_server_keeps_no_keys_waiting() {
    let server = ServerOptions::new().start();
    let Some(mut terminal) = watch(&server) else { return };
    terminal.until(EMPTY);
    server.process.stop();
    terminal.until("does not answer");
    terminal.keys("?");
    terminal.until(HELP);
    terminal.keys("q");
    assert_eq!(terminal.ended(), 0);
    server.process.go_on();
}

#[test]
fn an_interrupt_gives_the_terminal_back() {
    let server = ServerOptions::new().start();
    let Some(mut terminal) = watch(&server) else { return };
    terminal.until(EMPTY);
    terminal.keys("\x03");
    assert_eq!(terminal.ended(), 0);
}

/// Returns whether a process watches this server.
fn is_watched(server: &Longshored) -> bool {
    let processes = fs::read_dir("/proc").expect("processes");
    let lines = processes.filter_map(|entry| fs::read_to_string(entry.ok()?.path().join("cmdline")).ok());
    let watches = format!("top\0--servers\0{}\0", server.address());
    lines.into_iter().any(|line| line.ends_with(&watches))
}

/// A program that ignores SIGHUP, as under `nohup`, is not ended by its terminal's end. `top` must end all the same.
#[test]
fn a_terminal_that_is_gone_ends_it() {
    let server = ServerOptions::new().start();
    let program = binaries::command("longshore").get_program().to_owned();
    let mut ignoring = Command::new("sh");
    ignoring.args(["-c", "trap \"\" HUP; exec \"$0\" \"$@\""]);
    ignoring.arg(program).args(["top", "--servers", server.address()]);
    let Some(terminal) = start(&ignoring) else { return };
    terminal.until(EMPTY);
    assert!(is_watched(&server));
    drop(terminal);
    eventually("its end", || (!is_watched(&server)).then_some(()));
}
