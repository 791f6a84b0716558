//! Logs to stderr, as text or one JSON object a line.
//!
//! Levels: `error`, a job or the server cannot go on; `warn`, an operator should act; `info`, life of servers and jobs;
//! `debug`, each refused request; `trace`, each shard's work.

use std::io::{self, IsTerminal};

use tracing_subscriber::EnvFilter;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    #[default]
    Text,
    Json,
}

/// Installs the process's subscriber; a second call does nothing. `filter` is an env-filter directive.
pub fn init(format: LogFormat, filter: &str) {
    let filter = EnvFilter::try_new(filter).unwrap_or_else(|_| EnvFilter::new("info"));
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal());
    let _ = match format {
        LogFormat::Text => builder.try_init(),
        LogFormat::Json => builder.json().try_init(),
    };
}
