//! The optimizer server: configuration, gRPC services, admission of jobs, startup and shutdown.
//!
//! `longshored` is this library and a `main`. The `longshore` command embeds this library for runs without `--servers`.

#![forbid(unsafe_code)]

mod accept;
pub mod config;
mod connections;
mod directories;
mod embedded;
mod http;
mod jobs;
pub mod lifecycle;
mod lock;
pub mod log;
mod members;
mod memfd;
mod neighbours;
mod places;
mod quota;
mod refusals;
mod requests;
mod service;
mod tasks;
mod trust;
mod unix;

use std::{ffi::OsString, io, thread, time::Duration};

use clap::{CommandFactory, Parser};
use longshore_engine::memory::{few_arenas, float};
use tokio::runtime::{Builder, Runtime};

pub use config::Config;
pub use embedded::Embedded;
pub use lifecycle::{Server, ServerError, StopSignals};

use config::{Flags, retired};

/// Builds the runtime of a server's connections, with a thread for every two cores. A connection keeps a core busy at
/// either end. Additional threads wake each other and move connections between cores. On two cores, with a worker
/// beside the server, a second thread at each end cost speed. A push over a Unix socket fell from 0.91 to 0.81 of a
/// raw socket.
pub fn runtime(thread_name: &str) -> io::Result<Runtime> {
    let threads = thread::available_parallelism().map_or(1, |cores| cores.get().div_ceil(2));
    let mut builder = Builder::new_multi_thread();
    builder
        .worker_threads(threads)
        .thread_name(thread_name)
        .on_thread_start(float::standard_thread)
        .enable_all()
        .build()
}

/// Longest time that calls on files may take after the server has stopped.
const LAST_CALLS: Duration = Duration::from_secs(5);

/// Runs the program with these arguments, its name first, until a stop signal. Returns the exit code. The head of
/// `main.rs` lists the codes.
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> u8 {
    few_arenas();
    let parsed = Flags::try_parse_from(arguments)
        .map_err(|error| retired::name_variable(error, Flags::command()))
        .map_err(|error| retired::explain(error, &retired::SETTINGS));
    let flags = match parsed {
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
    log::init(config.log_format, config.log.clone(), None);
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
    let runtime =
        runtime("network").map_err(|error| ServerError::Threads { threads: 1, reason: error.to_string() })?;
    let served = runtime.block_on(async {
        let signals = StopSignals::catch()?;
        let server = Server::start(config).await?;
        // The only line on stdout. Scripts wait for this line, and read the port from it after asking for port 0.
        println!("longshored listening on {}", server.shown());
        server.run_until(signals).await
    });
    // After a drain only deletions and listings of files may remain. Such calls take a moment, and hang forever if the
    // folder hangs.
    runtime.shutdown_timeout(if served.is_ok() { LAST_CALLS } else { Duration::ZERO });
    served
}
