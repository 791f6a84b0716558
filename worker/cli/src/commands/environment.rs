//! Environment variables of the command line. A mistyped name is refused, with the nearest known name.

use clap::{Command, CommandFactory};
use longshore_server::config::{ConfigError, check_variables};

use super::{Cli, RETIRED};

const PREFIX: &str = "LONGSHORE_";
/// Variables without a flag: those that the update kernels of an embedded server read, and those of tests.
const NO_FLAGS: [&str; 9] = [
    "LONGSHORE_ISA",
    "LONGSHORE_BIN_DIR",
    "LONGSHORE_TEST_PYTHON",
    "LONGSHORE_TEST_PERTURB",
    "LONGSHORE_TEST_SKIPPED",
    "LONGSHORE_SOAK",
    "LONGSHORE_SEED",
    "LONGSHORE_CACHE",
    "LONGSHORE_SKIP_PACKAGE",
];

/// Checks the process's environment variables.
///
/// # Errors
/// `UnknownVariable` for the first variable that starts with `LONGSHORE_` and belongs to no flag.
pub fn check_environment() -> Result<(), ConfigError> {
    let command = Cli::command();
    let mut known = NO_FLAGS.to_vec();
    collect(&command, &mut known);
    let names = std::env::vars_os().map(|(name, _)| name.to_string_lossy().into_owned());
    check_variables(PREFIX, (&known, &RETIRED), names)
}

fn collect<'a>(command: &'a Command, known: &mut Vec<&'a str>) {
    known.extend(command.get_arguments().filter_map(|flag| flag.get_env()?.to_str()));
    command.get_subcommands().for_each(|command| collect(command, known));
}
