//! Threads that sum and update blocks. A general thread pool would spin while idle, at the network threads' cost. It
//! would also move a block to another core at every step, perhaps on another NUMA node.
//!
//! A pool of n has n - 1 threads: the caller takes a share itself, which saves a wake-up on each side. Idle threads
//! sleep in a futex, after they have spun for [`SPIN`]. Results never depend on the thread that computed them. The
//! server owns one pool, and each job's compute thread calls it.

mod account;
mod cpus;
mod phase;
#[cfg(test)]
mod tests;

use std::{
    any::Any,
    hint, io,
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle, Thread},
    time::{Duration, Instant},
};

pub use self::{account::Account, cpus::available_threads};
use self::{
    account::{Meter, Queue},
    cpus::{Seat, seats},
    phase::{Phase, share},
};
use crate::{
    lock,
    memory::{
        Near, float,
        lend::{Loan, lend},
    },
};

/// Time that a thread spins before it sleeps. The caller spins for blocks that other threads have begun, at most 70 us
/// each. Other threads spin for the next call, which comes within 20 us during updates; a wake-up takes 25 to 50 us.
/// Steps of 48 shards took 122.8 ms with spinning and 125.2 ms without. Over TCP, where network threads want the cores,
/// the time is the same.
const SPIN: Duration = Duration::from_micros(60);

/// A pool of threads. Several callers may use it at once; each computes too, so that none waits for another.
pub struct ThreadPool {
    seats: Vec<Seat>,
    /// True if there is more than one node, so that each core has memory that is nearer to it.
    several_nodes: bool,
    shared: Arc<CallBoard>,
    threads: Vec<JoinHandle<()>>,
    /// The account of calls without an account of their own.
    anybody: Arc<Account>,
}

struct CallBoard {
    calls: Mutex<Vec<Arc<Call>>>,
    /// The number of calls so far.
    posted: AtomicUsize,
    stop: AtomicBool,
    queue: Queue,
}

/// A call in progress, as the pool's threads see it.
struct Call {
    loan: Loan,
    phase: Arc<Phase>,
    account: Arc<Account>,
}

impl CallBoard {
    /// Returns the call whose blocks this seat should take next.
    fn next(&self, seat: usize) -> Option<Arc<Call>> {
        let calls = lock(&self.calls);
        let open = calls.iter().filter(|call| call.phase.has_blocks_for(seat));
        let call = open.min_by_key(|call| call.account.used()).map(Arc::clone)?;
        self.queue.serve(&call.account);
        Some(call)
    }
}

impl ThreadPool {
    /// # Errors
    /// If a thread cannot be started. A thread that cannot be bound to a core or lowered in priority runs all the same.
    pub fn new(threads: usize) -> io::Result<ThreadPool> {
        ThreadPool::on(threads.max(1), &cpus::nodes())
    }

    fn on(threads: usize, nodes: &[cpus::Node]) -> io::Result<ThreadPool> {
        let seats = seats(threads, nodes);
        let shared = Arc::new(CallBoard {
            calls: Mutex::new(Vec::new()),
            posted: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            queue: Queue::default(),
        });
        let (several_nodes, anybody) = (nodes.len() > 1, Account::new());
        let mut pool = ThreadPool { several_nodes, shared, threads: Vec::new(), seats, anybody };
        // Threads start last first: each wakes the two that come after it in the tree, so it needs their
        // handles.
        let mut handles: Vec<Option<Thread>> = vec![None; threads];
        for seat in (1..threads).rev() {
            let wakes = children(seat, threads).filter_map(|child| handles[child].clone()).collect();
            let (shared, cores) = (Arc::clone(&pool.shared), pool.seats[seat].cores.clone());
            let name = format!("update-{seat}");
            let serve = move || serve(seat, &cores, &shared, wakes);
            let thread = thread::Builder::new().name(name).spawn(serve)?;
            handles[seat] = Some(thread.thread().clone());
            pool.threads.push(thread);
        }
        pool.threads.reverse();
        Ok(pool)
    }

    /// How many threads compute at once, the caller included.
    pub fn threads(&self) -> usize {
        self.seats.len()
    }

    /// Binds the calling thread to the core of seat 0 and lowers its priority, like the pool's own threads. Meant for
    /// the thread that makes most of the calls. Other callers stay unbound.
    pub fn adopt_caller(&self) {
        settle(&self.seats[0].cores);
    }

    /// Runs `block` on every item and returns the results in order. A panic in a block is resumed here, once no other
    /// block runs. Some blocks may never have run then.
    pub fn blocks<T: Send, R: Send>(&self, items: Vec<T>, block: impl Fn(T) -> R + Sync) -> Vec<R> {
        self.groups(&self.anybody, vec![items], block, || ()).pop().expect("as many groups as were given")
    }

    /// Runs `block` on every item of several groups without a pause between them. Each item runs where
    /// [`ThreadPool::blocks`] would run it with its group alone. The caller does `meanwhile` before its own share. Where
    /// other calls are open, the pool's threads are shared among the accounts.
    pub fn groups<T: Send, R: Send>(
        &self,
        account: &Arc<Account>,
        groups: Vec<Vec<T>>,
        block: impl Fn(T) -> R + Sync,
        meanwhile: impl FnOnce(),
    ) -> Vec<Vec<R>> {
        let lens: Vec<usize> = groups.iter().map(Vec::len).collect();
        if self.seats.len() == 1 || lens.iter().sum::<usize>() < 2 {
            meanwhile();
            return groups.into_iter().map(|items| items.into_iter().map(&block).collect()).collect();
        }
        let seats = self.seats.len();
        let mut groups: Vec<_> = groups.into_iter().map(Vec::into_iter).collect();
        let (mut items, mut runs) = (Vec::with_capacity(lens.iter().sum()), Vec::with_capacity(seats));
        for seat in 0..seats {
            let first = items.len();
            for (group, &len) in groups.iter_mut().zip(&lens) {
                items.extend(group.take(share(len, seat, seats).len()).map(|item| Mutex::new(Some(item))));
            }
            runs.push(first..items.len());
        }
        let mut results = self.run(account, &items, runs, block, meanwhile).into_iter();
        let mut sorted: Vec<Vec<R>> = lens.iter().map(|&len| Vec::with_capacity(len)).collect();
        for seat in 0..seats {
            for (group, &len) in sorted.iter_mut().zip(&lens) {
                group.extend(results.by_ref().take(share(len, seat, seats).len()));
            }
        }
        sorted
    }

    /// Runs `block` on every item. Each seat begins with its own run of items.
    fn run<T: Send, R: Send>(
        &self,
        account: &Arc<Account>,
        items: &[Mutex<Option<T>>],
        runs: Vec<Range<usize>>,
        block: impl Fn(T) -> R + Sync,
        meanwhile: impl FnOnce(),
    ) -> Vec<R> {
        let phase = Arc::new(Phase::new(runs, &self.seats));
        let results: Vec<Mutex<Option<R>>> = items.iter().map(|_| Mutex::new(None)).collect();
        let panicked: Mutex<Option<Box<dyn Any + Send>>> = Mutex::new(None);
        let work = |seat: usize| {
            let mut meter = Meter::new(&self.shared.queue, account);
            while let Some(index) = phase.take(seat) {
                let item = lock(&items[index]).take().expect("a block is taken once");
                match catch_unwind(AssertUnwindSafe(|| block(item))) {
                    Ok(result) => *lock(&results[index]) = Some(result),
                    Err(payload) => {
                        phase.abandon();
                        lock(&panicked).get_or_insert(payload);
                    }
                }
                // The caller stays with its own call, so that each call makes progress.
                if meter.count() && seat > 0 {
                    break;
                }
            }
        };
        self.call(&work, &phase, account, meanwhile);
        if let Some(payload) = lock(&panicked).take() {
            resume_unwind(payload);
        }
        let results = results.into_iter().map(|slot| slot.into_inner().ok().flatten());
        results.map(|result| result.expect("every block ran")).collect()
    }

    /// Runs `work` until the phase has no blocks left and no thread runs any of them.
    fn call(
        &self,
        work: &(dyn Fn(usize) + Sync),
        phase: &Arc<Phase>,
        account: &Arc<Account>,
        meanwhile: impl FnOnce(),
    ) {
        let shared = &self.shared;
        lend(work, |loan| {
            let (phase, account) = (Arc::clone(phase), Arc::clone(account));
            let call = Arc::new(Call { loan: loan.clone(), phase, account });
            {
                let mut calls = lock(&shared.calls);
                shared.queue.enter(&call.account);
                calls.push(Arc::clone(&call));
            }
            shared.posted.fetch_add(1, Ordering::Release);
            self.wake();
            meanwhile();
            // The caller takes over the blocks that late threads have not begun, so that it never waits for a wake-up.
            loan.run(0);
            {
                let mut calls = lock(&shared.calls);
                calls.retain(|other| !Arc::ptr_eq(other, &call));
                shared.queue.leave(&call.account);
            }
            spin_while(|| loan.is_in_use());
        });
    }

    fn wake(&self) {
        for child in children(0, self.seats.len()) {
            self.threads[child - 1].thread().unpark();
        }
    }
}

impl Near for ThreadPool {
    /// Runs `part` once for each seat, with the seat's share of `0..count` in [`ThreadPool::blocks`]. A thread on the
    /// seat's node runs it, since first touch decides the node of memory.
    fn shares(&self, count: usize, part: &(dyn Fn(Range<usize>) + Sync)) {
        let seats = self.seats.len();
        let run = |seat: usize| part(share(count, seat, seats));
        if !self.several_nodes {
            self.blocks((0..seats).collect(), run);
            return;
        }
        // This happens once in a job's life, so plain threads do it. The pool's threads would help each other
        // across nodes.
        thread::scope(|scope| {
            for (seat, Seat { cores, .. }) in self.seats.iter().enumerate() {
                let run = &run;
                scope.spawn(move || {
                    settle(cores);
                    run(seat);
                });
            }
        });
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        for thread in self.threads.drain(..) {
            thread.thread().unpark();
            // A block's panic was given to its caller, and the thread does not panic itself.
            let _ = thread.join();
        }
    }
}

/// Returns the seats that a seat wakes, as in a tree. In a row, 63 wake-ups would take longer than a shard's update.
fn children(seat: usize, seats: usize) -> Range<usize> {
    (2 * seat + 1).min(seats)..(2 * seat + 3).min(seats)
}

fn serve(seat: usize, cores: &[usize], shared: &CallBoard, wakes: Vec<Thread>) {
    settle(cores);
    while !shared.stop.load(Ordering::Acquire) {
        let posted = shared.posted.load(Ordering::Acquire);
        match shared.next(seat) {
            Some(call) => {
                // A thread that has not slept since the last call has not woken its children yet.
                wakes.iter().for_each(Thread::unpark);
                call.loan.run(seat);
                // The seat may have left blocks because another call is due.
                if !call.phase.has_blocks_for(seat) {
                    spin_while(|| shared.posted.load(Ordering::Relaxed) == posted);
                }
            }
            None => {
                thread::park();
                // Children are woken before the look at the calls: this thread's node may be done, and a child's not.
                wakes.iter().for_each(Thread::unpark);
            }
        }
    }
}

/// Returns once `waiting` is false, or after [`SPIN`].
fn spin_while(waiting: impl Fn() -> bool) {
    let begun = Instant::now();
    while waiting() && begun.elapsed() < SPIN {
        hint::spin_loop();
    }
}

/// Binds the calling thread, lowers its priority a little and leaves the host process's floating-point mode.
fn settle(cores: &[usize]) {
    float::standard_thread();
    if !cores.is_empty()
        && let Err(error) = cpus::bind(cores)
    {
        tracing::debug!(%error, ?cores, "an update thread could not be bound to its cores");
    }
    if let Err(error) = rustix::process::nice(NICE) {
        tracing::debug!(%error, "an update thread could not be lowered");
    }
}

/// Priority of update threads: one step below the network threads, which work little and must not wait. A network
/// thread woke every millisecond beside two busy threads of its priority. In three runs it was 83, 2790 and 1861 us
/// late (90th percentile). At a priority one step above the busy threads, it was 77, 81 and 76 us late. More steps
/// gained nothing, and would cost the update its share against other processes.
const NICE: i32 = 1;
