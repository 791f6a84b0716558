//! `--trace FILE`: begin, end and thread of each stage of a step, in Chrome's trace format.

use std::{
    cell::Cell,
    collections::BTreeMap,
    fmt::Debug,
    fs::File,
    io::{self, BufWriter, Write},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::Instant,
};

use anyhow::Context as _;
use longshore_server::log::Reader;
use serde_json::{Value, json};
use tracing::{
    Event,
    field::{Field, Visit},
    span::{Attributes, Id},
};
use tracing_subscriber::{Layer, Registry, filter::Targets, layer::Context};

/// Target of spans that are stages, in every crate.
const STAGE: &str = "stage";

thread_local! {
    /// True once the trace has this thread's name.
    static NAMED: Cell<bool> = const { Cell::new(false) };
}

#[derive(clap::Args)]
pub(super) struct TraceFlag {
    /// Write when each stage ran to this file, for ui.perfetto.dev
    #[arg(long, value_name = "FILE")]
    pub(super) trace: Option<PathBuf>,
}

#[derive(clap::Args)]
pub(super) struct Traced<T: clap::Args> {
    #[command(flatten)]
    pub(super) args: T,
    #[command(flatten)]
    pub(super) trace: TraceFlag,
}

/// Starts the trace. The file is complete once the second part of the result is dropped.
pub(super) fn to(path: &Path) -> anyhow::Result<(Reader, Complete)> {
    let open = || {
        let mut file = BufWriter::new(File::create(path)?);
        file.write_all(b"[\n")?;
        io::Result::Ok(Shared::new(Mutex::new(Some(Out { file, separator: "" }))))
    };
    let out = open().with_context(|| format!("--trace {}", path.display()))?;
    let stages = Stages { began: Instant::now(), out: Arc::clone(&out) };
    let filter = Targets::new().with_target(STAGE, tracing::Level::DEBUG);
    Ok((stages.with_filter(filter).boxed(), Complete(out)))
}

/// A trace's file; None after its end.
type Shared = Arc<Mutex<Option<Out>>>;

struct Out {
    file: BufWriter<File>,
    /// Text to write before the next event: none before the first, then a comma.
    separator: &'static str,
}

/// Completes a trace's file when dropped.
pub(super) struct Complete(Shared);

impl Drop for Complete {
    fn drop(&mut self) {
        let out = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(mut out) = out else { return };
        if let Err(error) = out.file.write_all(b"\n]").and_then(|()| out.file.flush()) {
            // If the terminal is gone too, the message is lost.
            let _ = writeln!(io::stderr(), "longshore: the trace is not complete: {error}");
        }
    }
}

/// Writes begin and end of each span under the thread that ran it, with the span's fields as text.
struct Stages {
    began: Instant,
    out: Shared,
}

impl Layer<Registry> for Stages {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, Registry>) {
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        if let Some(span) = context.span(id) {
            span.extensions_mut().insert(fields);
        }
    }

    fn on_enter(&self, id: &Id, context: Context<'_, Registry>) {
        if let Some(span) = context.span(id) {
            let args = span.extensions().get::<Fields>().map(|fields| json!(fields.0));
            self.write("B", span.name(), args);
        }
    }

    fn on_exit(&self, id: &Id, context: Context<'_, Registry>) {
        if let Some(span) = context.span(id) {
            self.write("E", span.name(), None);
        }
    }

    fn on_event(&self, event: &Event<'_>, _: Context<'_, Registry>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        let name = fields.0.remove("message").unwrap_or_else(|| STAGE.into());
        self.write("i", &name, Some(json!(fields.0)));
    }
}

impl Stages {
    fn write(&self, phase: &str, name: &str, args: Option<Value>) {
        let us = self.began.elapsed().as_nanos() as f64 / 1e3;
        let tid = rustix::thread::gettid().as_raw_nonzero();
        let event = json!({"ph": phase, "pid": 1, "tid": tid, "ts": us, "name": name, "args": args});
        let mut out = self.out.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(Out { file, separator }) = &mut *out else { return };
        let mut put = |event: Value| {
            // An error, as of a full drive, shows when the file is completed.
            let _ = write!(file, "{separator}{event}");
            *separator = ",\n";
        };
        if !NAMED.replace(true) {
            let name = thread::current().name().unwrap_or_default().to_string();
            put(json!({"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": name}}));
        }
        put(event);
    }
}

#[derive(Default)]
struct Fields(BTreeMap<&'static str, String>);

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0.insert(field.name(), format!("{value:?}"));
    }
}
