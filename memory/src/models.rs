//! Models of the hand-overs between threads, in every order that Rust's memory model allows. `.ci/run --all` runs them.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use loom::{
    cell::UnsafeCell,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    thread,
};

use super::{
    lend::lend,
    region::{look, publish},
};

/// Cells that the work borrows, one for each seat. A model fails if two threads use a cell without a wait between them.
struct Borrowed([UnsafeCell<u32>; 2]);

// SAFETY: loom checks every access.
unsafe impl Sync for Borrowed {}

impl Borrowed {
    fn new() -> Borrowed {
        Borrowed([UnsafeCell::new(0), UnsafeCell::new(0)])
    }

    fn add(&self, seat: usize) {
        // SAFETY: as above.
        self.0[seat].with_mut(|value| unsafe { *value += 1 });
    }

    /// Takes the values, as the lender does once it has its work back.
    fn take(&self) -> [u32; 2] {
        // SAFETY: as above.
        [0, 1].map(|seat| self.0[seat].with_mut(|value| unsafe { std::mem::replace(&mut *value, 99) }))
    }
}

/// Borrowers try to run the lent work at any time, also after the lender has taken it back.
#[test]
fn loom_a_lender_waits_for_all_who_run_its_work() {
    loom::model(|| {
        let borrowed = Borrowed::new();
        let work = |seat: usize| borrowed.add(seat);
        let borrowers = lend(&work, |loan| {
            [0, 1].map(|seat| {
                let loan = loan.clone();
                thread::spawn(move || loan.run(seat))
            })
        });
        let seen = borrowed.take();
        let ran = borrowers.map(|borrower| borrower.join().unwrap());
        assert_eq!(seen, ran.map(u32::from), "who ran it did so before it was taken back");
        assert_eq!(borrowed.take(), [99, 99], "and nobody did after");
    });
}

/// The lender runs a share itself, as a thread pool does, and checks if borrowers still run their shares.
#[test]
fn loom_a_lender_that_works_too_waits_as_well() {
    loom::model(|| {
        let borrowed = Borrowed::new();
        let work = |seat: usize| borrowed.add(seat);
        let borrower = lend(&work, |loan| {
            let other = loan.clone();
            let borrower = thread::spawn(move || other.run(1));
            assert!(loan.run(0));
            let _ = loan.is_in_use();
            borrower
        });
        let [own, others] = borrowed.take();
        assert_eq!((own, others), (1, u32::from(borrower.join().unwrap())));
    });
}

#[test]
fn loom_a_lender_that_unwinds_waits_too() {
    loom::model(|| {
        let borrowed = Borrowed::new();
        let work = |seat: usize| borrowed.add(seat);
        let mut borrower = None;
        let unwound = catch_unwind(AssertUnwindSafe(|| {
            lend(&work, |loan| {
                let loan = loan.clone();
                borrower = Some(thread::spawn(move || loan.run(0)));
                resume_unwind(Box::new(()))
            })
        }));
        assert!(unwound.is_err());
        let [seen, _] = borrowed.take();
        assert_eq!(seen, u32::from(borrower.unwrap().join().unwrap()));
    });
}

#[test]
fn loom_work_that_unwinds_is_given_back() {
    loom::model(|| {
        let borrowed = Borrowed::new();
        let work = |seat: usize| {
            borrowed.add(seat);
            resume_unwind(Box::new(()));
        };
        let borrower = lend(&work, |loan| {
            let loan = loan.clone();
            thread::spawn(move || catch_unwind(AssertUnwindSafe(|| loan.run(0))).is_err())
        });
        let [seen, _] = borrowed.take();
        assert_eq!(seen, u32::from(borrower.join().unwrap()));
    });
}

/// A writer takes two words of an image from version 1 to 2, while another process reads them. The reader's loads are
/// volatile, and relaxed atomics stand for them here.
#[test]
fn loom_what_is_read_between_equal_stamps_is_one_version() {
    loom::model(|| {
        let shared = Arc::new((AtomicU64::new(1), [AtomicU64::new(1), AtomicU64::new(1)]));
        let writer = Arc::clone(&shared);
        let writer = thread::spawn(move || {
            let (stamp, image) = &*writer;
            publish(stamp, 0);
            image.iter().for_each(|word| word.store(2, Relaxed));
            publish(stamp, 2);
        });
        let (stamp, image) = &*shared;
        let before = look(stamp);
        let read = [image[0].load(Relaxed), image[1].load(Relaxed)];
        if before != 0 && look(stamp) == before {
            assert_eq!(read, [before; 2]);
        }
        writer.join().unwrap();
    });
}
