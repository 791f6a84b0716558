//! The program `longshored`, for its binary and for the Python wheel: parse, log, serve, drain.

use std::{ffi::OsString, time::Duration};

use clap::Parser;
use longshore_engine::memory::few_arenas;

use crate::{
    config::{Config, Flags, retired},
    lifecycle::{Server, ServerError, StopSignals},
    log,
};

/// Longest time that calls on files may take after the server has stopped.
const LAST_CALLS: Duration = Duration::from_secs(5);

/// Runs the program with these arguments, its name first, until a stop signal. Returns the exit code: 0 after a drain,
/// 2 for a wrong flag, variable or configuration key. 1 means that it cannot serve or got a second stop signal.
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> u8 {
    few_arenas();
    let parsed = Flags::try_parse_from(arguments);
    let flags = match parsed.map_err(|error| retired::explain(error, &retired::SETTINGS)) {
        Ok(flags) => flags,
        Err(usage) => {
            // Printing fails only if the terminal is gone.
            let _ = usage.print();
            return usage.exit_code() as u8;
        }
    };
    let config = match Config::resolve(flags) {
        Ok(config) => config,
        Err(error) => {
            eprintln!("longshored: {error}");
            return 2;
        }
    };
    log::init(config.log_format, &config.log, None);
    match serve(config) {
        Ok(()) => 0,
        Err(error) => {
            tracing::error!("{error:#}");
            eprintln!("longshored: {error:#}");
            1
        }
    }
}

fn serve(config: Config) -> Result<(), ServerError> {
    let runtime = crate::runtime("network")
        .map_err(|error| ServerError::Threads { threads: 1, reason: error.to_string() })?;
    let served = runtime.block_on(async {
        let signals = StopSignals::catch()?;
        let server = Server::start(config).await?;
        // The only line on stdout. Scripts wait for it, and read the port from it after asking for port 0.
        println!("longshored listening on {}", server.shown());
        server.run_until(signals).await
    });
    // After a drain only deletions and listings of files may remain. Such calls take a moment, and hang forever if the
    // folder hangs.
    runtime.shutdown_timeout(if served.is_ok() { LAST_CALLS } else { Duration::ZERO });
    served
}
