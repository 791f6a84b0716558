//! The binary `longshore`: trains, and manages jobs on servers.
//!
//! Exit codes: 0 success, 1 an error that the last line on stderr explains, 2 wrong arguments.

#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    longshore_cli::run(std::env::args_os()).into()
}
