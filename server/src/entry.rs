//! The program `longshored`, for its own binary and for the wheel: parse, log, serve, drain.

use std::{ffi::OsString, time::Duration};

use clap::Parser;
use longshore_engine::memory::few_arenas;

use crate::{
    config::{Config, Flags, retired},
    lifecycle::{Server, ServerError, StopSignals},
    log,
};

/// How long calls that work on files may go on once the server has stopped.
const LAST_CALLS: Duration = Duration::from_secs(5);

/// Runs the program with these arguments, its name first, until it is told to stop. Returns its exit code: 0 after a drain,
/// 1 when it cannot serve or was told to stop a second time, 2 for a wrong flag, variable or configuration key.
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> u8 {
    few_arenas();
    let parsed = Flags::try_parse_from(arguments);
    let flags = match parsed.map_err(|error| retired::explain(error, &retired::SETTINGS)) {
        Ok(flags) => flags,
        Err(usage) => {
            // A terminal that is gone cannot be told.
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
        // This is the one line on stdout: scripts wait for it, and read the port from it when they asked for 0.
        println!("longshored listening on {}", server.address());
        server.run_until(signals).await
    });
    // After a drain nothing is left that counts, but for what deletes or lists files: that may take a moment, and for ever where a
    // folder hangs.
    runtime.shutdown_timeout(if served.is_ok() { LAST_CALLS } else { Duration::ZERO });
    served
}
