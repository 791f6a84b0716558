//! What the library and a server of this process log, handed to Python's `logging`.
//!
//! Records wait until a call from Python takes them along. To log at once, threads of the network would have to wait for the GIL.

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

/// How many records wait at most; with some 200 bytes each they take as much as a small message. Those that come first are kept, since they
/// say how a trouble began.
const KEPT: usize = 256;

struct Record {
    level: Level,
    /// The module that says it.
    target: &'static str,
    text: String,
}

#[derive(Default)]
struct Waiting {
    records: VecDeque<Record>,
    /// How many came when there was no room.
    lost: usize,
}

static WAITING: Mutex<Waiting> = Mutex::new(Waiting { records: VecDeque::new(), lost: 0 });
/// Lets a call that finds nothing go on without the lock.
static IS_ANY: AtomicBool = AtomicBool::new(false);

/// From now on what is logged in this process is kept for [`pass_on`]. Where one of the commands runs in it, the log stays the command's.
pub(crate) fn listen() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let ours = Keep.with_filter(LevelFilter::INFO);
        let _ = tracing_subscriber::registry().with(ours).try_init();
    });
}

/// Hands what waits to `logging`, as loggers `longshore.worker`, `longshore.server` and so on.
///
/// # Errors
/// What a signal's handler raises meanwhile. A handler of `logging` that fails is said to be broken, and no more.
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

/// `longshore_worker::cluster::vigil` is said by `longshore.worker`, and the record of operators' calls by `longshore.audit`.
fn logger(target: &str) -> String {
    let room = target.split("::").next().unwrap_or_default();
    format!("longshore.{}", room.strip_prefix("longshore_").unwrap_or(room))
}

/// The level's number in `logging`.
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

/// An event as one line: what it says, then its fields.
#[derive(Default)]
struct Text {
    message: String,
    fields: String,
}

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Writing to a string does not fail.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " {name}={value:?}"),
        };
    }
}
