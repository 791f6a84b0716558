//! The tasks of a session, and the tokio runtime that carries them out. The library's blocking calls wait here for
//! asynchronous work, until the caller interrupts them.

use std::{
    fmt,
    future::Future,
    num::NonZeroUsize,
    pin::{Pin, pin},
    sync::{Arc, Mutex, Weak},
    task::{Context, Poll, Wake, Waker, ready},
    thread::{self, Thread},
    time::{Duration, Instant},
};

use futures_util::future::{AbortHandle, Abortable};
use longshore_memory::float;
use tokio::{runtime::Handle, sync::oneshot};

use crate::{
    error::{Environment, Interrupted, Misuse, Result},
    host::{SimulatedHost, entered},
    lock,
};

/// Period at which a waiting call asks its `Interrupt`.
const PERIOD: Duration = Duration::from_millis(50);

/// A question that a waiting call asks on its own thread, twenty times a second. The answer true ends the wait
/// with [`Interrupted`]. The default asks nothing.
#[derive(Clone, Default)]
pub struct Interrupt(Option<Arc<dyn Fn() -> bool + Send + Sync>>);

impl Interrupt {
    pub fn when(asks: impl Fn() -> bool + Send + Sync + 'static) -> Interrupt {
        Interrupt(Some(Arc::new(asks)))
    }
}

impl fmt::Debug for Interrupt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Interrupt(by a function)" } else { "Interrupt(never)" })
    }
}

/// The longest wait of `block_briefly`, which uses no timers. Waits with deadlines and reports begin only after it, and
/// are far longer.
const MOMENT: Duration = Duration::from_millis(20);
/// Largest number of threads of a session's own runtime: one frames while the other converts and checks.
const RUNTIME_THREADS: usize = 2;

/// Wakes a thread that blocks on a future.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

pub(crate) struct Runtime {
    executor: Executor,
    interrupt: Interrupt,
    /// Tasks that live as long as the session.
    tasks: Mutex<Vec<(AbortHandle, Weak<()>)>>,
}

enum Executor {
    /// The session's own runtime.
    Own(tokio::runtime::Runtime),
    /// The caller's runtime.
    Given(Handle),
    Simulated(Arc<dyn SimulatedHost>),
    /// Shut down with the session.
    Gone,
}

impl Runtime {
    pub(super) fn start(given: Option<Handle>, interrupt: Interrupt) -> Result<Runtime> {
        let executor = match (entered(), given) {
            (Some(host), _) => Executor::Simulated(host),
            (None, Some(handle)) => Executor::Given(handle),
            (None, None) => Executor::Own(own()?),
        };
        Ok(Runtime { executor, interrupt, tasks: Mutex::default() })
    }

    /// Returns true if tasks run on the session's own threads.
    pub(super) fn is_own(&self) -> bool {
        matches!(self.executor, Executor::Own(_))
    }

    fn handle(&self) -> Option<&Handle> {
        match &self.executor {
            Executor::Own(own) => Some(own.handle()),
            Executor::Given(handle) => Some(handle),
            Executor::Simulated(_) | Executor::Gone => None,
        }
    }

    /// Blocks this thread on `future`. On a thread of an async runtime it returns an error, where tokio would
    /// panic. An interrupt by the caller drops `future` where it stands.
    pub(crate) fn block_on<T>(&self, future: impl Future<Output = Result<T>>) -> Result<T> {
        if Handle::try_current().is_ok() {
            let message = "a blocking call of the worker library was made on an async runtime's thread: use \
                           tokio::task::spawn_blocking or a thread of your own";
            return Err(Misuse(message).into());
        }
        let Some(handle) = self.handle() else { return self.simulate(future) };
        let Interrupt(Some(asks)) = &self.interrupt else { return handle.block_on(future) };
        let mut future = pin!(future);
        loop {
            let turn = async { tokio::time::timeout(PERIOD, future.as_mut()).await };
            if let Ok(done) = handle.block_on(turn) {
                return done;
            }
            // The question is asked outside the runtime, since the caller's code may call this library again.
            if asks() {
                return Err(Interrupted.into());
            }
        }
    }

    fn simulate<T>(&self, future: impl Future<Output = Result<T>>) -> Result<T> {
        let mut done = None;
        if let Executor::Simulated(host) = &self.executor {
            host.block_on(pin!(async { done = Some(future.await) }));
        }
        done.unwrap_or_else(|| Err(Interrupted.into()))
    }

    /// Blocks this thread on `future` for a moment. Timers of the runtime are avoided: their thread would wake, and
    /// compete with this thread for their lock. Returns None after the moment.
    pub(crate) fn block_briefly<T>(&self, future: impl Future<Output = T>) -> Option<T> {
        if Handle::try_current().is_ok() {
            return None; // see `block_on`
        }
        let _entered = self.handle()?.enter();
        let waker = Waker::from(Arc::new(Unpark(thread::current())));
        let (mut future, end) = (pin!(future), Instant::now() + MOMENT);
        loop {
            if let Poll::Ready(value) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
                return Some(value);
            }
            thread::park_timeout(end.checked_duration_since(Instant::now())?);
        }
    }

    /// Starts a task that ends by itself or by its `AbortHandle`.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) -> AbortHandle {
        let (abort, registration) = AbortHandle::new_pair();
        let task = Abortable::new(task, registration);
        match (&self.executor, self.handle()) {
            (Executor::Simulated(host), _) => host.spawn(Box::pin(async { _ = task.await })),
            (_, Some(handle)) => _ = handle.spawn(task),
            _ => {}
        }
        abort
    }

    /// Starts a task whose result is awaited.
    pub(crate) fn spawn_joined<T: Send + 'static>(
        &self,
        task: impl Future<Output = T> + Send + 'static,
    ) -> Task<T> {
        let (sender, result) = oneshot::channel();
        let abort = self.spawn(async move { _ = sender.send(task.await) });
        Task { abort, result }
    }

    /// Starts a task that lives as long as the session. The task keeps the cluster alive, and the cluster the
    /// runtime. Only `end_tasks` breaks this cycle.
    pub(crate) fn spawn_for_session(&self, task: impl Future<Output = ()> + Send + 'static) {
        let runs = Arc::new(());
        let alive = Arc::downgrade(&runs);
        let handle = self.spawn(async move {
            task.await;
            drop(runs);
        });
        let mut tasks = lock(&self.tasks);
        tasks.retain(|(_, alive)| alive.strong_count() > 0);
        tasks.push((handle, alive));
    }

    /// Ends the tasks that live as long as the session.
    pub(super) fn end_tasks(&self) {
        for (task, _) in lock(&self.tasks).drain(..) {
            task.abort();
        }
    }
}

fn own() -> Result<tokio::runtime::Runtime> {
    // On two cores a second thread competes with the server's threads, or with the caller.
    let cores = thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let built = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(RUNTIME_THREADS.min(cores.div_ceil(2)))
        .thread_name("longshore-io")
        .on_thread_start(float::standard_thread)
        .enable_all()
        .build();
    built.map_err(|error| {
        Environment {
            what: "starting the session's threads",
            cause: error.to_string(),
            remedy: "raise the limits on processes and open files (ulimit -u, ulimit -n)",
        }
        .into()
    })
}

/// A background task. Dropping the `Task` aborts it.
pub(crate) struct Task<T> {
    abort: AbortHandle,
    result: oneshot::Receiver<T>,
}

/// A task ended without a result: it panicked, or its session has ended.
#[derive(Debug)]
pub(crate) struct Ended;

impl<T> Task<T> {
    /// Returns the result once there is one, without a wait.
    pub(crate) fn ended(&mut self) -> Option<Result<T, Ended>> {
        match self.result.try_recv() {
            Ok(result) => Some(Ok(result)),
            Err(oneshot::error::TryRecvError::Empty) => None,
            Err(oneshot::error::TryRecvError::Closed) => Some(Err(Ended)),
        }
    }
}

impl<T> Future for Task<T> {
    type Output = Result<T, Ended>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Poll::Ready(ready!(Pin::new(&mut self.result).poll(context)).map_err(|_| Ended))
    }
}

impl<T> Drop for Task<T> {
    fn drop(&mut self) {
        self.abort.abort();
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        // The last clone of the cluster may be dropped on a thread of this runtime. Waiting for the runtime would
        // panic there.
        if let Executor::Own(own) = std::mem::replace(&mut self.executor, Executor::Gone) {
            own.shutdown_background();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        future::pending,
        sync::atomic::{AtomicU32, Ordering::Relaxed},
    };

    use super::*;
    use crate::error::Error;

    /// The caller's code may block on the same runtime, so the question is asked outside of it.
    #[test]
    fn a_caller_who_asks_for_an_end_ends_the_wait_and_not_what_comes_in_time() {
        static ASKED: AtomicU32 = AtomicU32::new(0);
        let interrupt = Interrupt::when(|| {
            assert!(Handle::try_current().is_err());
            ASKED.fetch_add(1, Relaxed) == 2
        });
        let runtime = Runtime::start(None, interrupt).unwrap();
        assert_eq!(runtime.block_on(async { Ok(7) }).unwrap(), 7);
        assert_eq!(ASKED.load(Relaxed), 0);
        assert!(matches!(runtime.block_on::<()>(pending()), Err(Error::Interrupted(_))));
        assert_eq!(ASKED.load(Relaxed), 3);
    }
}
