//! Threads that help a call to copy. What they are late for the call does itself, so that it waits for copies that have begun and
//! never for a thread.

use std::{
    collections::VecDeque,
    sync::{
        Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    thread,
};

use longshore_memory::lend::{Loan, lend};
use pyo3::pyfunction;

/// More threads than these move no more bytes a second on any host that we know of.
const MOST: usize = 16;
/// Calls that ended before a helper came leave entries, of which no more than these are kept.
const MOST_POSTED: usize = 4 * MOST;

/// How many threads copy at once, that of the call included.
static THREADS: AtomicUsize = AtomicUsize::new(1);
static BOARD: Board =
    Board { posted: Mutex::new(Posted { loans: VecDeque::new(), helpers: 0 }), changed: Condvar::new() };

/// Has so many threads copy at once from now on.
#[pyfunction]
pub(crate) fn set_copy_threads(threads: usize) {
    THREADS.store(threads.clamp(1, MOST), Relaxed);
}

struct Board {
    posted: Mutex<Posted>,
    changed: Condvar,
}

struct Posted {
    /// Work for one helper each.
    loans: VecDeque<Loan>,
    /// How many helpers were started. They never end.
    helpers: usize,
}

/// Does all parts, each once, on as many threads as were set.
///
/// # Panics
/// If one of them does.
pub(crate) fn spread(parts: usize, part: impl Fn(usize) + Sync) {
    let helpers = THREADS.load(Relaxed).min(parts).saturating_sub(1);
    if helpers == 0 {
        return (0..parts).for_each(part);
    }
    let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let work = |_: usize| {
        while let Some(index) = Some(next.fetch_add(1, Relaxed)).filter(|&index| index < parts) {
            part(index);
            done.fetch_add(1, Relaxed);
        }
    };
    lend(&work, |loan| {
        BOARD.post(loan, helpers);
        loan.run(0);
    });
    assert_eq!(done.into_inner(), parts, "a helper failed");
}

impl Board {
    fn lock(&self) -> MutexGuard<'_, Posted> {
        // Every change is one call on the queue, or a number.
        self.posted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn post(&self, loan: &Loan, helpers: usize) {
        let mut posted = self.lock();
        while posted.helpers < helpers {
            let started = thread::Builder::new().name("longshore-copy".into()).spawn(|| BOARD.help());
            if started.is_err() {
                break; // the others do its part
            }
            posted.helpers += 1;
        }
        posted.loans.extend((0..helpers).map(|_| loan.clone()));
        let surplus = posted.loans.len().saturating_sub(MOST_POSTED);
        posted.loans.drain(..surplus);
        drop(posted);
        self.changed.notify_all();
    }

    fn help(&self) {
        loop {
            let empty = |posted: &mut Posted| posted.loans.is_empty();
            let waited = self.changed.wait_while(self.lock(), empty);
            let loan = waited.unwrap_or_else(PoisonError::into_inner).loans.pop_front();
            if let Some(loan) = loan {
                loan.run(0);
            }
        }
    }
}
