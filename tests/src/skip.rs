//! Reports tests that cannot run on this machine as skipped instead of passed.

use std::{env, fs::OpenOptions, io::Write, panic::Location, thread};

/// A file that gets a line for each skipped test. `tests/run` sets the variable.
const REPORT: &str = "LONGSHORE_TEST_SKIPPED";

/// Reports the calling test as skipped. The test returns after the call.
///
/// `cuda.rs` of the worker has a copy: a unit test cannot use this crate, which is built from the worker.
#[track_caller]
pub fn skipped(reason: &str) {
    let file = Location::caller().file();
    let thread = thread::current();
    let line = format!("{file}: {}: {reason}\n", thread.name().unwrap_or("a test"));
    eprint!("skipped: {line}");
    if let Some(path) = env::var_os(REPORT) {
        let file = OpenOptions::new().create(true).append(true).open(path);
        // A single write, since other tests report at the same time.
        file.and_then(|mut file| file.write_all(line.as_bytes())).expect("the report of skipped tests");
    }
}
