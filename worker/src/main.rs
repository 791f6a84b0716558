//! `longshore`: train, and look after the servers' jobs.
//!
//! Exit codes: 0 done, 1 an error that the last line on stderr explains, 2 wrong arguments.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    let cli = longshore_worker::cli::Cli::parse();
    match cli.run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("longshore: {error:#}");
            ExitCode::FAILURE
        }
    }
}
