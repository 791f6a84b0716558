//! Passes log records of the library, and of a server in this process, to Python's `logging`.
//!
//! Records wait until a call from Python takes them along. Logging at once would make network threads wait for the
//! GIL.

use std::{
    collections::VecDeque,
    fmt::{self, Write},
    mem,
    sync::{
        Mutex, Once, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

use pyo3::{exceptions::PyException, prelude::*};
use tracing::{
    Event, Level, Subscriber,
    field::{Field, Visit},
    level_filters::LevelFilter,
};
use tracing_subscriber::{Layer, layer::Context, prelude::*};

/// Largest number of records that wait: 50 KB at some 200 bytes each. The first records are kept, since they tell how a
/// trouble began.
const KEPT: usize = 256;

struct Record {
    level: Level,
    /// The module that logged the record.
    target: &'static str,
    text: String,
}

#[derive(Default)]
struct Waiting {
    records: VecDeque<Record>,
    /// Number of records that found no room.
    lost: usize,
}

static WAITING: Mutex<Waiting> = Mutex::new(Waiting { records: VecDeque::new(), lost: 0 });
/// Lets a call without waiting records skip the lock.
static IS_ANY: AtomicBool = AtomicBool::new(false);

/// Keeps the log records of this process for [`pass_on`] from now on. If one of the commands runs in this process,
/// the log stays the command's.
pub(crate) fn listen() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let ours = Keep.with_filter(LevelFilter::INFO);
        let _ = tracing_subscriber::registry().with(ours).try_init();
    });
}

/// Passes waiting records to `logging`, as loggers `longshore.worker`, `longshore.server` and so on.
///
/// # Errors
/// An exception of a signal handler meanwhile. A failing handler of `logging` is only reported as unraisable.
pub(crate) fn pass_on(py: Python<'_>) -> PyResult<()> {
    if !IS_ANY.swap(false, Relaxed) {
        return Ok(());
    }
    let Waiting { records, lost } = mem::take(&mut *WAITING.lock().unwrap_or_else(PoisonError::into_inner));
    match log(py, records, lost) {
        Err(error) if error.is_instance_of::<PyException>(py) => {
            error.write_unraisable(py, None);
            Ok(())
        }
        logged => logged,
    }
}

fn log(py: Python<'_>, records: VecDeque<Record>, lost: usize) -> PyResult<()> {
    let logging = py.import("logging")?;
    for Record { level, target, text } in records {
        let logger = logging.call_method1("getLogger", (logger(target),))?;
        logger.call_method1("log", (number(level), "%s", text))?;
    }
    if lost > 0 {
        let text = format!("{lost} records of Longshore's log were not kept");
        logging
            .call_method1("getLogger", ("longshore",))?
            .call_method1("log", (number(Level::WARN), "%s", text))?;
    }
    Ok(())
}

/// Maps `longshore_worker::cluster::vigil` to `longshore.worker`, and the record of operators' calls to
/// `longshore.audit`.
fn logger(target: &str) -> String {
    let room = target.split("::").next().unwrap_or_default();
    format!("longshore.{}", room.strip_prefix("longshore_").unwrap_or(room))
}

/// Returns the level's number in `logging`.
fn number(level: Level) -> u8 {
    match level {
        Level::ERROR => 40,
        Level::WARN => 30,
        Level::INFO => 20,
        Level::DEBUG | Level::TRACE => 10,
    }
}

/// Keeps every event.
struct Keep;

impl<S: Subscriber> Layer<S> for Keep {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut text = Text::default();
        event.record(&mut text);
        let metadata = event.metadata();
        let record =
            Record { level: *metadata.level(), target: metadata.target(), text: text.message + &text.fields };
        let mut waiting = WAITING.lock().unwrap_or_else(PoisonError::into_inner);
        if waiting.records.len() < KEPT {
            waiting.records.push_back(record);
        } else {
            waiting.lost += 1;
        }
        IS_ANY.store(true, Relaxed);
    }
}

/// An event as one line: its message, then its fields.
#[derive(Default)]
struct Text {
    message: String,
    fields: String,
}

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Writing to a string cannot fail.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " {name}={value:?}"),
        };
    }
}
