//! Loans of work to threads that outlive the borrows in it, which safe Rust cannot express. The engine's update threads
//! run their shares of an update this way. The lender returns only after its last borrower, also when the lender
//! unwinds.

// loom's models replace atomics and parking.
#[cfg(loom)]
use loom::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread::{self, Thread},
};
#[cfg(not(loom))]
use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread::{self, Thread},
};

/// Bit that is set once the lender wants its work back. The other bits count the threads that run the work now.
const RECALLED: usize = 1 << (usize::BITS - 1);

type Task = dyn Fn(usize) + Sync;

/// Work on loan. Clones may be kept for ever, and run nothing once the work is recalled.
#[derive(Clone)]
pub struct Loan(Arc<Lent>);

struct Lent {
    work: *const Task,
    users: AtomicUsize,
    lender: Thread,
}

// SAFETY: the work is `Sync`, so any thread may call it; `run` sees to it that it is still alive.
unsafe impl Send for Lent {}
// SAFETY: as above.
unsafe impl Sync for Lent {}

/// Calls `with` with `work` on loan. Waits for every thread that runs the work before it returns.
pub fn lend<R>(work: &(dyn Fn(usize) + Sync), with: impl FnOnce(&Loan) -> R) -> R {
    // SAFETY: only the lifetime changes. `Recall` is dropped in this frame, within `work`'s true lifetime. Its drop
    // waits until no borrower is inside, and later ones are refused.
    let work: *const Task = unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), &'static Task>(work) };
    let lent = Lent { work, users: AtomicUsize::new(0), lender: thread::current() };
    let recall = Recall(Loan(Arc::new(lent)));
    with(&recall.0)
}

impl Loan {
    /// Returns true while a borrower runs the work.
    pub fn is_in_use(&self) -> bool {
        self.0.users.load(Ordering::Relaxed) & !RECALLED > 0
    }

    /// Runs the work, unless it has been recalled.
    pub fn run(&self, seat: usize) -> bool {
        let enter = |users| (users & RECALLED == 0).then_some(users + 1);
        if self.0.users.fetch_update(Ordering::Acquire, Ordering::Relaxed, enter).is_err() {
            return false;
        }
        let _inside = Inside(&self.0);
        // SAFETY: this thread is counted and the work was not recalled, so the lender waits until `_inside` is dropped.
        (unsafe { &*self.0.work })(seat);
        true
    }
}

struct Inside<'a>(&'a Lent);

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        // Release lets the lender see the work's writes. From here on the work may be gone, while the loan itself still
        // lives.
        if self.0.users.fetch_sub(1, Ordering::Release) == RECALLED + 1 {
            self.0.lender.unpark();
        }
    }
}

struct Recall(Loan);

impl Drop for Recall {
    fn drop(&mut self) {
        let users = &self.0.0.users;
        users.fetch_or(RECALLED, Ordering::Relaxed);
        while users.load(Ordering::Acquire) != RECALLED {
            thread::park();
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::{
        panic::{AssertUnwindSafe, catch_unwind},
        sync::{
            atomic::{AtomicBool, AtomicUsize, Ordering},
            mpsc,
        },
        thread,
        time::Duration,
    };

    use super::*;

    /// The lender unwinds while a borrower is inside, and the lent work must still outlive the borrower.
    #[test]
    fn waits_for_borrowers_even_when_unwinding() {
        let finished = AtomicBool::new(false);
        let (inside, entered) = mpsc::channel();
        let work = |_: usize| {
            inside.clone().send(()).unwrap();
            // The pause is long enough to show a lender that did not wait.
            thread::park_timeout(Duration::from_millis(50));
            finished.store(true, Ordering::Relaxed);
        };
        let work: &(dyn Fn(usize) + Sync) = &work;
        let mut borrower = None;
        let unwound = catch_unwind(AssertUnwindSafe(|| {
            lend(work, |loan| {
                let loan = loan.clone();
                borrower = Some(thread::spawn(move || loan.run(0)));
                entered.recv().unwrap();
                panic!("the lender fails");
            })
        }));
        assert!(unwound.is_err());
        assert!(finished.load(Ordering::Relaxed), "the lender came back before its borrower");
        assert!(borrower.unwrap().join().unwrap());
    }

    #[test]
    fn runs_nothing_once_recalled() {
        let runs = AtomicUsize::new(0);
        let work = |_: usize| {
            runs.fetch_add(1, Ordering::Relaxed);
        };
        let kept = lend(&work, |loan| {
            assert!(loan.run(0));
            loan.clone()
        });
        assert!(!kept.run(0));
        assert_eq!(runs.load(Ordering::Relaxed), 1);
    }
}
