//! `longshored`: parse, log, serve, drain.
//!
//! Exit codes: 0 after a drain, 2 for a wrong flag, variable or configuration key. 1 means that it cannot serve or got
//! a second stop signal.

#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    longshore_server::run(std::env::args_os()).into()
}
