//! The optimizer server: configuration, gRPC services, admission of jobs, startup and shutdown.
//!
//! `longshored` is this library and a `main`. The `longshore` command embeds it for runs without `--servers`.

#![forbid(unsafe_code)]

mod accept;
pub mod config;
mod connections;
mod descriptors;
mod directories;
mod draining;
mod embedded;
mod entry;
mod http;
mod jobs;
pub mod lifecycle;
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
mod unasked;
mod unix;

use std::{io, thread};

use longshore_engine::memory::float;
use tokio::runtime::{Builder, Runtime};

pub use config::Config;
pub use embedded::Embedded;
pub use entry::run;
pub use lifecycle::{Server, ServerError, StopSignals};

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
