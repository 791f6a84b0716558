//! Runs one call of a binary to its end, with a deadline.

use std::{ffi::OsStr, process::Command};

use crate::{binaries, process::Process};

/// Exit code, stdout and stderr of a finished command.
#[derive(Debug)]
pub struct Output {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

/// Runs `longshore` with these arguments.
pub fn longshore<Text: AsRef<OsStr>>(arguments: impl IntoIterator<Item = Text>) -> Output {
    run("longshore", binaries::command("longshore").args(arguments))
}

/// Runs `longshore` with these arguments to a successful end.
#[track_caller]
pub fn done<Text: AsRef<OsStr>>(arguments: impl IntoIterator<Item = Text>) -> Output {
    let output = longshore(arguments);
    assert_eq!(output.code, 0, "{output:?}");
    output
}

/// Runs `longshored` with these arguments. The server must refuse to start: if it serves, the test fails at the
/// deadline.
pub fn longshored<Text: AsRef<OsStr>>(arguments: impl IntoIterator<Item = Text>) -> Output {
    run("longshored", binaries::command("longshored").args(arguments))
}

/// Runs any command to its end.
pub fn run(name: &str, command: &mut Command) -> Output {
    let mut process = Process::start(name, command);
    let mut stdout = String::new();
    while let Some(line) = process.line() {
        stdout.push_str(&line);
        stdout.push('\n');
    }
    Output { code: process.code(), stdout, stderr: process.stderr() }
}
