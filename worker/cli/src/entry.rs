//! The program `longshore`, for its own binary and for the wheel.

use std::ffi::OsString;

use clap::Parser;

use crate::commands::{Cli, check_environment};

/// Runs the program with these arguments, its name first. Returns its exit code: 0 when it is done, 1 for an error that the
/// last line on stderr explains, 2 for wrong arguments.
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> u8 {
    let parsed = Cli::try_parse_from(arguments);
    // Help is given whatever the environment is. But a flag that is missing may be a variable that was mistyped.
    let helps = parsed.as_ref().is_err_and(|error| !error.use_stderr());
    if let (false, Err(error)) = (helps, check_environment()) {
        eprintln!("longshore: {error}");
        return 2;
    }
    match parsed.map(Cli::run) {
        Ok(Ok(())) => 0,
        Ok(Err(error)) => {
            eprintln!("longshore: {error:#}");
            1
        }
        Err(usage) => {
            // A terminal that is gone cannot be told.
            let _ = usage.print();
            usage.exit_code() as u8
        }
    }
}
