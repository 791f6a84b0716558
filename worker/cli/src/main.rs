//! `longshore`: train, and look after the servers' jobs.
//!
//! Exit codes: 0 done, 1 an error that the last line on stderr explains, 2 wrong arguments.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    let parsed = longshore_cli::commands::Cli::try_parse();
    // Help is given whatever the environment is. But a flag that is missing may be a variable that was mistyped.
    let helps = parsed.as_ref().is_err_and(|error| !error.use_stderr());
    if let (false, Err(error)) = (helps, longshore_cli::commands::check_environment()) {
        eprintln!("longshore: {error}");
        return ExitCode::from(2);
    }
    let cli = parsed.unwrap_or_else(|error| error.exit());
    match cli.run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("longshore: {error:#}");
            ExitCode::FAILURE
        }
    }
}
