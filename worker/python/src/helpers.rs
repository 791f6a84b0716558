//! Helper threads for copies of a call. The call itself copies the parts that no helper has begun, so it never
//! waits for an idle thread.

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

/// Largest number of copying threads. More threads move no more bytes a second on any host that we know of.
const MOST: usize = 16;
/// Largest number of entries on the board. A call that ends before a helper comes leaves its entries, so the oldest
/// are dropped.
const MOST_POSTED: usize = 4 * MOST;

/// Number of threads that copy at once, including the caller's.
static THREADS: AtomicUsize = AtomicUsize::new(1);
static BOARD: Board =
    Board { posted: Mutex::new(Posted { loans: VecDeque::new(), helpers: 0 }), changed: Condvar::new() };

/// Sets the number of threads that copy at once.
#[pyfunction]
pub(crate) fn set_copy_threads(threads: usize) {
    THREADS.store(threads.clamp(1, MOST), Relaxed);
}

struct Board {
    posted: Mutex<Posted>,
    changed: Condvar,
}

struct Posted {
    /// Work, an entry for each helper.
    loans: VecDeque<Loan>,
    /// Number of helper threads started. Helpers never end.
    helpers: usize,
}

/// Runs every part once, on the threads that were set.
///
/// # Panics
/// If a part panics.
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
        // A poisoned lock may be taken. Every change is one call on the queue, or one number, so a panic leaves the
        // board valid.
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
