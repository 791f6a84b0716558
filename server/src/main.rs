//! `longshored`: parse, log, serve, drain.
//!
//! Exit codes: 0 after a drain, 1 when it cannot serve or was told to stop a second time, 2 for a wrong flag, variable or configuration key.

#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    longshore_server::run(std::env::args_os()).into()
}
