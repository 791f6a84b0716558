//! Logs to stderr, as text or one JSON object a line.
//!
//! | level | records |
//! |---|---|
//! | `error` | a job or the server cannot go on |
//! | `warn` | an operator should act |
//! | `info` | start and end of servers and jobs |
//! | `debug` | each refused request |
//! | `trace` | each shard's work |

use std::{
    io::{self, Write},
    sync::Mutex,
    time::{Duration, Instant},
};

use longshore_proto::legible;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::{
    Layer, Registry, filter::Targets, fmt, layer::SubscriberExt, util::SubscriberInitExt,
};

use crate::lock::lock;

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
        let mut last = lock(&self.0);
        if last.is_none_or(|last| now - last >= PERIOD) {
            *last = Some(now);
            something();
        }
    }
}

/// Installs the process's subscriber; a second call does nothing. The `other` layer has a filter of its own.
pub fn init(format: LogFormat, filter: Targets, other: Option<Reader>) {
    let filter = without_guests(filter);
    let stderr = fmt::layer().with_writer(|| Lines(io::stderr()));
    let stderr = match format {
        LogFormat::Text => stderr.with_filter(filter).boxed(),
        LogFormat::Json => stderr.json().with_filter(filter).boxed(),
    };
    let _ = tracing_subscriber::registry().with(other).with(stderr).try_init();
}

/// Writer of whole records, one a line. Text from outside may contain an end of line, which would forge a record, or
/// commands to the terminal. Ends of lines, commands and colours are escaped.
struct Lines<W>(W);

impl<W: Write> Write for Lines<W> {
    fn write(&mut self, record: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(record);
        let line = text.strip_suffix('\n').unwrap_or(&text);
        self.0.write_all(format!("{}\n", legible(line)).as_bytes())?;
        Ok(record.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Limits the crate h2 to errors unless `filter` names it, as in `info,h2=warn`. The crate warns of every connection
/// whose peer resets calls too fast, so strangers could fill the log.
fn without_guests(filter: Targets) -> Targets {
    if filter.iter().any(|(target, _)| target.starts_with("h2")) {
        return filter;
    }
    let most = filter.default_level().unwrap_or(LevelFilter::OFF);
    filter.with_target("h2", most.min(LevelFilter::ERROR))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tracing::Level;

    use super::*;

    #[test]
    fn a_record_is_a_line_whatever_it_quotes() {
        #[derive(Clone, Default)]
        struct Kept(Arc<Mutex<Vec<u8>>>);
        impl Write for Kept {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                self.0.lock().unwrap().write(bytes)
            }

            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let kept = Kept::default();
        let writer = kept.clone();
        let layer = fmt::layer().with_writer(move || Lines(writer.clone()));
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || {
            let fault = "x\n2026-01-01T00:00:00Z  INFO audit: who=\"operator\" \u{1b}[1A\u{202e}";
            tracing::warn!(name = fault, error = %fault, "{fault}");
        });
        let text = String::from_utf8(kept.0.lock().unwrap().clone()).unwrap();
        assert_eq!(text.lines().count(), 1, "{text}");
        assert!(text.contains("\\u001b[1A\\u202e") && text.ends_with('\n'), "{text}");
    }

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
