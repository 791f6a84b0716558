//! The optimizer server: configuration, gRPC services, admission of jobs, life and death of the process.
//!
//! `longshored` is this library and a `main`; the `longshore` command embeds it for runs without `--servers`.

#![forbid(unsafe_code)]

pub mod config;
mod directories;
mod jobs;
pub mod lifecycle;
pub mod log;
mod memfd;
mod service;
mod unix;

pub use config::Config;
pub use lifecycle::{Server, ServerError, StopSignals};
