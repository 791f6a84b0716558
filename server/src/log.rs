//! Logs to stderr, as text or one JSON object a line.
//!
//! Levels: `error`, a job or the server cannot go on; `warn`, an operator should act; `info`, start and end of servers
//! and jobs; `debug`, each refused request; `trace`, each shard's work.

use std::{
    io::{self, IsTerminal},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use tracing::level_filters::LevelFilter;
use tracing_subscriber::{
    Layer, Registry, filter::Targets, fmt, layer::SubscriberExt, util::SubscriberInitExt,
};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    #[default]
    Text,
    Json,
}

/// An additional layer that reads log records.
pub type Reader = Box<dyn Layer<Registry> + Send + Sync>;

/// Minimum interval between repeats of a message.
const PERIOD: Duration = Duration::from_secs(10);

/// Rate limit of one message: at most once a period.
#[derive(Default)]
pub(crate) struct Seldom(Mutex<Option<Instant>>);

impl Seldom {
    pub(crate) fn say(&self, something: impl FnOnce()) {
        let now = Instant::now();
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if last.is_none_or(|last| now - last >= PERIOD) {
            *last = Some(now);
            something();
        }
    }
}

/// Installs the process's subscriber; a second call does nothing. `filter` is a level, or levels by module as in
/// `info,longshore_engine=debug`. The `other` layer has a filter of its own.
pub fn init(format: LogFormat, filter: &str, other: Option<Reader>) {
    let filter =
        without_guests(filter.parse().unwrap_or_else(|_| Targets::new().with_default(LevelFilter::INFO)));
    let stderr = fmt::layer().with_writer(io::stderr).with_ansi(io::stderr().is_terminal());
    let stderr = match format {
        LogFormat::Text => stderr.with_filter(filter).boxed(),
        LogFormat::Json => stderr.json().with_filter(filter).boxed(),
    };
    let _ = tracing_subscriber::registry().with(other).with(stderr).try_init();
}

/// Limits the crate h2 to errors unless `filter` names it, as in `info,h2=warn`. h2 warns of every connection whose
/// peer resets calls too fast, so strangers could fill the log.
fn without_guests(filter: Targets) -> Targets {
    if filter.iter().any(|(target, _)| target.starts_with("h2")) {
        return filter;
    }
    let most = filter.default_level().unwrap_or(LevelFilter::OFF);
    filter.with_target("h2", most.min(LevelFilter::ERROR))
}

#[cfg(test)]
mod tests {
    use tracing::Level;

    use super::*;

    #[test]
    fn warnings_that_strangers_cause_are_heard_where_they_are_asked_for() {
        for (filter, warns, fails) in [
            ("info", false, true),
            ("trace", false, true),
            ("off", false, false),
            ("info,h2=warn", true, true),
            ("off,h2::proto=debug", true, true),
            ("longshore_server=info", false, false),
        ] {
            let filtered = without_guests(filter.parse().unwrap());
            let hears = |level| filtered.would_enable("h2::proto::streams::recv", &level);
            assert_eq!((hears(Level::WARN), hears(Level::ERROR)), (warns, fails), "{filter}");
        }
        assert!(without_guests("info".parse().unwrap()).would_enable("longshore_server", &Level::INFO));
    }
}
