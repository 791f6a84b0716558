//! The simulated hosts. Tasks and trainers of all processes run one at a time, in an order that the seed decides. The
//! clock moves only when nothing can run.

use std::{
    cell::Cell,
    collections::{BTreeMap, BTreeSet},
    future::Future,
    mem,
    pin::{Pin, pin},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Wake, Waker},
    thread,
    time::Duration,
};

use longshore_wire::Channel;
use longshore_worker::host::{self, SimulatedHost, Work};

use crate::network::Network;

pub(crate) type ProcessId = usize;

/// The process of tasks that no kill may end: they carry messages and inject faults.
pub(crate) const OUTSIDE: ProcessId = 0;

/// Largest number of turns of tasks in one `run`. An undisturbed run takes some thousands, so a run that needs more
/// hangs.
const MOST_TURNS: usize = 1_000_000;

/// Lines of the trace that a failed seed prints.
const TRACE: usize = 400;

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// Rarity of slow or failed messages and writes, drawn by the run's seed. The rate 40 means one case in 40.
pub(crate) struct Rates {
    /// Rate of packets that arrive late, because they were lost and sent again.
    pub(crate) late: u64,
    /// Rate of answers that are lost.
    pub(crate) lost: u64,
    /// Rate of calls that still arrive after their caller has given them up.
    pub(crate) stray: u64,
    slow_write: u64,
}

impl Rates {
    fn draw(seed: u64) -> Rates {
        let one_of = |place: u64, of: [u64; 3]| of[(mix(mix(seed) ^ place) % 3) as usize];
        Rates {
            late: one_of(1, [30, 200, 200]),
            lost: one_of(2, [40, 400, 400]),
            stray: one_of(3, [2, 8, 10_000]),
            slow_write: one_of(4, [1, 2, 6]),
        }
    }
}

enum Body {
    Task(Work),
    /// A task whose future is out of this enum, because it is being polled.
    Polled,
    /// A main thread of a process, such as a trainer's.
    Thread,
}

struct Task {
    process: ProcessId,
    body: Body,
    is_ready: bool,
}

struct Process {
    name: String,
    is_stopped: bool,
    is_dead: bool,
    /// Time by which the host's clock is ahead of simulated time.
    skew: Duration,
    died: tokio::sync::watch::Sender<bool>,
}

struct State {
    now: Duration,
    random: u64,
    tasks: BTreeMap<usize, Task>,
    ready: Vec<usize>,
    timers: BTreeMap<(Duration, usize), Waker>,
    next: usize,
    processes: Vec<Process>,
    trace: Vec<String>,
}

pub(crate) struct Sim {
    state: Mutex<State>,
    /// The task of the main thread that runs. None while the scheduler runs.
    turn: Mutex<Option<usize>>,
    turned: Condvar,
    pub(crate) network: Network,
    pub(crate) rates: Rates,
    /// Incarnations have random bits. Without them, processes that began at the same time would be equal.
    is_random: bool,
}

thread_local! {
    static TRAINER: Cell<usize> = const { Cell::new(0) };
}

struct TaskWaker {
    sim: Arc<Sim>,
    task: usize,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        let mut state = lock(&self.sim.state);
        let State { tasks, ready, .. } = &mut *state;
        if let Some(task) = tasks.get_mut(&self.task)
            && !mem::replace(&mut task.is_ready, true)
        {
            ready.push(self.task);
        }
    }
}

impl Sim {
    pub(crate) fn new(seed: u64, is_random: bool) -> Arc<Sim> {
        let state = State {
            now: Duration::from_secs(1_000_000),
            random: mix(seed ^ 0x9e37_79b9_7f4a_7c15),
            tasks: BTreeMap::new(),
            ready: Vec::new(),
            timers: BTreeMap::new(),
            next: 1,
            processes: Vec::new(),
            trace: Vec::new(),
        };
        let sim = Sim {
            state: Mutex::new(state),
            turn: Mutex::new(None),
            turned: Condvar::new(),
            network: Network::default(),
            rates: Rates::draw(seed),
            is_random,
        };
        let sim = Arc::new(sim);
        assert_eq!(sim.process("outside", Duration::ZERO), OUTSIDE);
        sim
    }

    pub(crate) fn process(self: &Arc<Self>, name: &str, skew: Duration) -> ProcessId {
        let died = tokio::sync::watch::Sender::new(false);
        let process = Process { name: name.into(), is_stopped: false, is_dead: false, skew, died };
        let mut state = lock(&self.state);
        state.processes.push(process);
        state.processes.len() - 1
    }

    pub(crate) fn host(self: &Arc<Self>, process: ProcessId) -> Arc<Host> {
        Arc::new(Host { sim: Arc::clone(self), process })
    }

    pub(crate) fn now(&self) -> Duration {
        lock(&self.state).now
    }

    pub(crate) fn random(&self) -> u64 {
        let mut state = lock(&self.state);
        state.random = state.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(state.random)
    }

    pub(crate) fn below(&self, bound: u64) -> u64 {
        self.random() % bound.max(1)
    }

    pub(crate) fn one_in(&self, count: u64) -> bool {
        self.below(count) == 0
    }

    /// Returns a random time below `most`.
    pub(crate) fn part_of(&self, most: Duration) -> Duration {
        Duration::from_micros(self.below(most.as_micros() as u64))
    }

    /// Simulates a write to a drive: a time below `usual`, or below 300 ms if the drive is slow.
    pub(crate) async fn write(self: &Arc<Self>, usual: Duration) {
        let is_slow = self.one_in(self.rates.slow_write);
        let time = self.part_of(if is_slow { Duration::from_millis(300) } else { usual });
        self.sleep(time).await;
    }

    pub(crate) fn note(&self, process: ProcessId, text: impl FnOnce() -> String) {
        let mut state = lock(&self.state);
        let at = state.now.as_secs_f64() - 1_000_000.0;
        let line = format!("{at:10.4} {:<12} {}", state.processes[process].name, text());
        state.trace.push(line);
        let surplus = state.trace.len().saturating_sub(2 * TRACE);
        if surplus > 0 {
            state.trace.drain(..TRACE);
        }
    }

    pub(crate) fn trace(&self) -> String {
        let state = lock(&self.state);
        let from = state.trace.len().saturating_sub(TRACE);
        state.trace[from..].join("\n")
    }

    pub(crate) fn died(&self, process: ProcessId) -> tokio::sync::watch::Receiver<bool> {
        lock(&self.state).processes[process].died.subscribe()
    }

    pub(crate) fn is_dead(&self, process: ProcessId) -> bool {
        lock(&self.state).processes[process].is_dead
    }

    pub(crate) fn is_silent(&self, process: ProcessId) -> bool {
        let process = &lock(&self.state).processes[process];
        process.is_dead || process.is_stopped
    }

    fn add(&self, process: ProcessId, body: Body) -> Option<usize> {
        let mut state = lock(&self.state);
        if state.processes[process].is_dead && matches!(body, Body::Task(_)) {
            drop(state);
            drop(body);
            return None;
        }
        let id = state.next;
        state.next += 1;
        state.tasks.insert(id, Task { process, body, is_ready: true });
        state.ready.push(id);
        Some(id)
    }

    pub(crate) fn spawn(&self, process: ProcessId, task: impl Future<Output = ()> + Send + 'static) {
        self.add(process, Body::Task(Box::pin(task)));
    }

    /// Starts the main thread of a process.
    pub(crate) fn main(self: &Arc<Self>, process: ProcessId, main: impl FnOnce() + Send + 'static) {
        let Some(id) = self.add(process, Body::Thread) else { return };
        let sim = Arc::clone(self);
        let run = move || {
            TRAINER.set(id);
            host::enter(Some(sim.host(process)));
            drop(sim.await_turn(id));
            main();
            host::enter(None);
            lock(&sim.state).tasks.remove(&id);
            sim.give(None);
        };
        thread::Builder::new().name(format!("process {process}")).spawn(run).expect("a thread");
    }

    /// Simulates work of a process's main thread: a random time below `most`.
    pub(crate) fn work(self: &Arc<Self>, process: ProcessId, most: Duration) {
        let work = pin!(self.sleep(self.part_of(most)));
        self.host(process).block_on(work);
    }

    fn give(&self, to: Option<usize>) {
        *lock(&self.turn) = to;
        self.turned.notify_all();
    }

    fn await_turn(&self, id: usize) -> MutexGuard<'_, Option<usize>> {
        let mut turn = lock(&self.turn);
        while *turn != Some(id) {
            turn = self.turned.wait(turn).unwrap_or_else(PoisonError::into_inner);
        }
        turn
    }

    pub(crate) fn kill(&self, process: ProcessId) {
        let (dropped, woken) = {
            let mut state = lock(&self.state);
            let of = &mut state.processes[process];
            (of.is_dead, of.is_stopped) = (true, false);
            let mine: Vec<usize> =
                state.tasks.iter().filter(|(_, task)| task.process == process).map(|(&id, _)| id).collect();
            let (mut dropped, mut woken) = (Vec::new(), Vec::new());
            for id in mine {
                match state.tasks[&id].body {
                    Body::Task(_) => dropped.extend(state.tasks.remove(&id)),
                    _ => woken.push(id),
                }
            }
            (dropped, woken)
        };
        drop(dropped);
        let mut state = lock(&self.state);
        let State { tasks, ready, processes, .. } = &mut *state;
        for id in woken {
            if let Some(task) = tasks.get_mut(&id)
                && !mem::replace(&mut task.is_ready, true)
            {
                ready.push(id);
            }
        }
        let died = processes[process].died.clone();
        drop(state);
        died.send_replace(true);
    }

    /// Stops a process, or lets it go on. Messages that it has sent before still arrive.
    pub(crate) fn stop(&self, process: ProcessId, is_stopped: bool) {
        lock(&self.state).processes[process].is_stopped = is_stopped;
    }

    /// Ends the threads of killed processes, and drops all tasks.
    pub(crate) fn finish(self: &Arc<Self>) {
        while let Some(id) = {
            let state = lock(&self.state);
            let thread = |(&id, task): (&usize, &Task)| matches!(task.body, Body::Thread).then_some(id);
            state.tasks.iter().find_map(thread)
        } {
            self.step(id);
        }
        let (tasks, timers) = {
            let mut state = lock(&self.state);
            (mem::take(&mut state.tasks), mem::take(&mut state.timers))
        };
        drop((tasks, timers));
    }

    /// Runs until `is_over` returns true. Returns false once nothing more can happen, at `end`, or after `MOST_TURNS`.
    pub(crate) fn run(self: &Arc<Self>, end: Duration, is_over: impl Fn() -> bool) -> bool {
        for _ in 0..MOST_TURNS {
            if is_over() {
                return true;
            }
            if let Some(id) = self.choose() {
                self.step(id);
                continue;
            }
            let due = {
                let mut state = lock(&self.state);
                let Some((&(at, _), _)) = state.timers.first_key_value() else { return false };
                state.now = state.now.max(at);
                let now = state.now;
                let later = state.timers.split_off(&(now, usize::MAX));
                mem::replace(&mut state.timers, later)
            };
            if self.now() > end {
                return false;
            }
            due.into_values().for_each(Waker::wake);
        }
        false
    }

    /// Chooses a task that is ready, at random by the seed. Tasks of stopped processes stay ready.
    fn choose(&self) -> Option<usize> {
        let mut state = lock(&self.state);
        let able: BTreeSet<usize> = {
            let runs = |id: &&usize| {
                let task = state.tasks.get(id);
                task.is_some_and(|task| !state.processes[task.process].is_stopped)
            };
            state.ready.iter().filter(runs).copied().collect()
        };
        let count = able.len() as u64;
        if count == 0 {
            return None;
        }
        state.random = state.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let chosen = mix(state.random) % count;
        let id = able.into_iter().nth(chosen as usize)?;
        state.ready.retain(|&ready| ready != id);
        state.tasks.get_mut(&id)?.is_ready = false;
        Some(id)
    }

    fn step(self: &Arc<Self>, id: usize) {
        let (process, body) = {
            let mut state = lock(&self.state);
            let Some(task) = state.tasks.get_mut(&id) else { return };
            let body = match task.body {
                Body::Thread => Body::Thread,
                _ => mem::replace(&mut task.body, Body::Polled),
            };
            (task.process, body)
        };
        match body {
            Body::Polled => {}
            Body::Thread => {
                self.give(Some(id));
                let mut turn = lock(&self.turn);
                while turn.is_some() {
                    turn = self.turned.wait(turn).unwrap_or_else(PoisonError::into_inner);
                }
            }
            Body::Task(mut task) => {
                host::enter(Some(self.host(process)));
                let waker = self.waker(id);
                let polled = task.as_mut().poll(&mut Context::from_waker(&waker));
                let mut state = lock(&self.state);
                let is_dead = state.processes[process].is_dead;
                let goes_on = polled.is_pending() && !is_dead;
                match state.tasks.get_mut(&id).filter(|_| goes_on) {
                    Some(entry) => entry.body = Body::Task(task),
                    None => {
                        state.tasks.remove(&id);
                        drop(state);
                        drop(task);
                    }
                }
                host::enter(None);
            }
        }
    }

    fn waker(self: &Arc<Self>, task: usize) -> Waker {
        Waker::from(Arc::new(TaskWaker { sim: Arc::clone(self), task }))
    }

    pub(crate) fn sleep(self: &Arc<Self>, time: Duration) -> Sleep {
        Sleep { sim: Arc::clone(self), at: self.now() + time }
    }
}

/// The worker library's view of the host that runs one process.
pub(crate) struct Host {
    sim: Arc<Sim>,
    process: ProcessId,
}

impl Host {
    fn skew(&self) -> Duration {
        lock(&self.sim.state).processes[self.process].skew
    }
}

impl SimulatedHost for Host {
    fn now(&self) -> Duration {
        self.sim.now() + self.skew()
    }

    fn sleep_until(&self, at: Duration) -> Work {
        Box::pin(Sleep { sim: Arc::clone(&self.sim), at: at.saturating_sub(self.skew()) })
    }

    fn spawn(&self, task: Work) {
        self.sim.add(self.process, Body::Task(task));
    }

    fn block_on(&self, mut future: Pin<&mut dyn Future<Output = ()>>) -> bool {
        let id = TRAINER.get();
        let waker = self.sim.waker(id);
        loop {
            if self.sim.is_dead(self.process) {
                return false;
            }
            if future.as_mut().poll(&mut Context::from_waker(&waker)).is_ready() {
                return true;
            }
            self.sim.give(None);
            drop(self.sim.await_turn(id));
        }
    }

    fn random(&self) -> u64 {
        if self.sim.is_random { self.sim.random() } else { 0 }
    }

    fn connect(&self, address: &str) -> Option<Channel> {
        self.sim.network.server(address).filter(|server| !self.sim.is_dead(server.process))?;
        Some(crate::network::connect(&self.sim, self.process, address))
    }
}

pub(crate) struct Sleep {
    sim: Arc<Sim>,
    at: Duration,
}

impl Future for Sleep {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let mut state = lock(&self.sim.state);
        if state.now >= self.at {
            return Poll::Ready(());
        }
        let id = state.next;
        state.next += 1;
        state.timers.insert((self.at, id), context.waker().clone());
        Poll::Pending
    }
}
