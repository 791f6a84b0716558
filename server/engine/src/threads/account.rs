//! Accounts of thread time, so that several jobs take turns.
//!
//! Start-time fair queueing: a free thread takes blocks of the open call whose account has used the least time. An
//! account without a call loses its unused time. A lone call is not measured.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    time::Instant,
};

/// Number of blocks after which a thread checks if another call is due. Blocks take 0.3 ms together, and a check takes
/// the lock of all calls.
const BATCH: u32 = 4;
/// The nanoseconds of thread time that one job has used.
pub struct Account {
    used: AtomicU64,
}

impl Account {
    pub fn new() -> Arc<Account> {
        Arc::new(Account { used: AtomicU64::new(0) })
    }

    pub(super) fn used(&self) -> u64 {
        self.used.load(Relaxed)
    }

    pub(super) fn use_up(&self, nanos: u64) {
        self.used.fetch_add(nanos, Relaxed);
    }
}

/// The fairness state of the open calls.
#[derive(Default)]
pub(super) struct Queue {
    open: AtomicUsize,
    /// Time that the last served call's account had used when the call was served.
    now: AtomicU64,
    /// The longest time that any account has used.
    most: AtomicU64,
}

impl Queue {
    /// Begins a call. Like the methods below, called under the lock of the calls.
    pub(super) fn enter(&self, account: &Account) {
        account.used.fetch_max(self.now.load(Relaxed), Relaxed);
        self.open.fetch_add(1, Relaxed);
    }

    pub(super) fn leave(&self, account: &Account) {
        let most = self.most.fetch_max(account.used(), Relaxed).max(account.used());
        if self.open.fetch_sub(1, Relaxed) == 1 {
            // Once no call is open, no account is owed time.
            self.now.fetch_max(most, Relaxed);
        }
    }

    /// Notes that a thread begins with the call of this account.
    pub(super) fn serve(&self, account: &Account) {
        self.now.fetch_max(account.used(), Relaxed);
    }

    fn is_shared(&self) -> bool {
        self.open.load(Relaxed) > 1
    }
}

/// Measures one thread's work on one call.
pub(super) struct Meter<'a> {
    queue: &'a Queue,
    account: &'a Account,
    begun: Option<Instant>,
    blocks: u32,
}

impl<'a> Meter<'a> {
    pub(super) fn new(queue: &'a Queue, account: &'a Account) -> Meter<'a> {
        let begun = queue.is_shared().then(Instant::now);
        Meter { queue, account, begun, blocks: 0 }
    }

    /// Counts a block. Returns true where it is time to look for another call.
    pub(super) fn count(&mut self) -> bool {
        self.blocks += 1;
        if self.begun.is_none() {
            self.begun = self.queue.is_shared().then(Instant::now);
            self.blocks = 0;
            return false;
        }
        let over = self.blocks >= BATCH;
        if over {
            self.charge();
            self.begun = self.queue.is_shared().then(Instant::now);
            self.blocks = 0;
        }
        over && self.begun.is_some()
    }

    fn charge(&mut self) {
        if let Some(begun) = self.begun.take() {
            self.account.use_up(begun.elapsed().as_nanos() as u64);
        }
    }
}

impl Drop for Meter<'_> {
    fn drop(&mut self) {
        if self.blocks > 0 {
            self.charge();
        }
    }
}
