//! `longshored`: parse, log, serve, drain.
//!
//! | exit code | reason |
//! |---|---|
//! | 0 | a stop signal, and a drain |
//! | 1 | the server could not serve, or got a second stop signal |
//! | 2 | a wrong flag, variable or configuration key |

#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    longshore_server::run(std::env::args_os()).into()
}
