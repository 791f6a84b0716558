//! `longshore`: train, and look after the servers' jobs.
//!
//! Exit codes: 0 done, 1 an error that the last line on stderr explains, 2 wrong arguments.

#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    longshore_cli::run(std::env::args_os()).into()
}
