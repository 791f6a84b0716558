//! `longshored`: parse, log, serve, drain.
//!
//! Exit codes: 0 after a drain, 1 when it cannot serve or was told to stop a second time, 2 for a wrong flag, variable or configuration key.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;
use longshore_server::{Config, Server, StopSignals, config::Flags, log};

fn main() -> ExitCode {
    let flags = Flags::parse();
    let config = match Config::resolve(flags) {
        Ok(config) => config,
        Err(error) => {
            eprintln!("longshored: {error}");
            return ExitCode::from(2);
        }
    };
    log::init(config.log_format, &config.log, None);
    match serve(config) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error:#}");
            eprintln!("longshored: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn serve(config: Config) -> anyhow::Result<()> {
    let runtime = longshore_server::runtime("network")?;
    let served = runtime.block_on(async {
        let signals = StopSignals::catch()?;
        let server = Server::start(config).await?;
        // This is the one line on stdout: scripts wait for it, and read the port from it when they asked for 0.
        println!("longshored listening on {}", server.address());
        server.run_until(signals).await?;
        Ok(())
    });
    if served.is_err() {
        // Nothing that still runs is waited for.
        runtime.shutdown_background();
    }
    served
}
