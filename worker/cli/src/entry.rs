//! Entry point of `longshore`, for its own binary and for the Python wheel.

use std::{ffi::OsString, io};

use clap::{CommandFactory, FromArgMatches};
use longshore_server::config::retired;

use crate::{
    commands::{Cli, RETIRED, check_environment},
    output::{self, WrongUse, fail},
    train::Stopped,
};

const FAILED: u8 = 1;
const WRONG_USE: u8 = 2;

/// Runs the program with these arguments, which begin with its name. The last line on stderr explains an error.
///
/// Returns the exit code: 0 on success, 1 for an error, 2 for wrong arguments. A run that a signal stopped has 130
/// or 143.
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> u8 {
    let arguments: Vec<OsString> = arguments.into_iter().collect();
    let errors_are_json = asks_for_json(&arguments);
    let parsed = Cli::command().try_get_matches_from(&arguments).and_then(|matches| {
        let cli = Cli::from_arg_matches(&matches).map_err(|error| error.format(&mut Cli::command()))?;
        Ok((cli, matches))
    });
    let parsed = parsed.map_err(|error| retired::explain(error, &RETIRED));
    // Help needs no valid environment. A missing flag may be a mistyped variable, so variables are checked first.
    let helps = parsed.as_ref().is_err_and(|error| !error.use_stderr());
    if let (false, Err(error)) = (helps, check_environment()) {
        return fail(&error.into(), WRONG_USE, errors_are_json);
    }
    match parsed {
        Ok((mut cli, matches)) => {
            let errors_are_json = cli.output().errors_are_json();
            if let Err(fault) = cli.settle(&matches) {
                return fail(&fault.into(), WRONG_USE, errors_are_json);
            }
            match cli.run().and_then(|()| output::check_printed()) {
                Ok(()) => 0,
                Err(error) => match error.downcast::<WrongUse>() {
                    Ok(WrongUse(error)) => fail(&error, WRONG_USE, errors_are_json),
                    Err(error) => {
                        let code = error.downcast_ref::<Stopped>().map_or(FAILED, Stopped::exit_code);
                        fail(&error, code, errors_are_json)
                    }
                },
            }
        }
        Err(usage) => {
            if errors_are_json && usage.use_stderr() {
                say_aside!("{}", output::usage(&usage));
                return usage.exit_code() as u8;
            }
            match usage.print() {
                // Help that could not be printed is a failure, unless its reader has closed the pipe.
                Err(error) if !usage.use_stderr() && error.kind() != io::ErrorKind::BrokenPipe => {
                    fail(&error.into(), FAILED, errors_are_json)
                }
                _ => usage.exit_code() as u8,
            }
        }
    }
}

/// Returns true if possibly wrong arguments ask for errors as JSON. The last occurrence counts, as for the parser.
fn asks_for_json(arguments: &[OsString]) -> bool {
    let words: Vec<_> = arguments.iter().map(|word| word.to_string_lossy()).collect();
    let given = words.iter().enumerate().rev().find_map(|(index, word)| match word.as_ref() {
        "--output" => words.get(index + 1).map(|value| value.to_string()),
        word => word.strip_prefix("--output=").map(str::to_string),
    });
    given.or_else(|| std::env::var("LONGSHORE_OUTPUT").ok()).as_deref() == Some("json")
}
