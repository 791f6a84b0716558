//! The host of a session: clock, tasks, random numbers and links. Tokio and sockets provide them, unless the calling
//! thread belongs to a simulated host. All waits of this library go through this module, so that a simulation can order
//! them.

use std::{
    cell::RefCell,
    future::Future,
    hash::{BuildHasher, RandomState},
    ops::{Add, Sub},
    pin::Pin,
    process,
    sync::Arc,
    time::{self, Duration, SystemTime, UNIX_EPOCH},
};

use longshore_wire::Channel;

/// A task or a wait as a simulated host carries it out.
pub type Work = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A simulated host of one process.
pub trait SimulatedHost: Send + Sync {
    /// Time since the simulation began, by this host's clock.
    fn now(&self) -> Duration;

    /// Ends once the clock has reached `at`.
    fn sleep_until(&self, at: Duration) -> Work;

    fn spawn(&self, task: Work);

    /// Runs the simulation on until `future` ends. Returns false if this process is killed before.
    fn block_on(&self, future: Pin<&mut dyn Future<Output = ()>>) -> bool;

    fn random(&self) -> u64;

    /// Returns a connection to a server. None if no process listens there.
    fn connect(&self, address: &str) -> Option<Channel>;
}

thread_local! {
    static ENTERED: RefCell<Option<Arc<dyn SimulatedHost>>> = const { RefCell::new(None) };
}

/// Makes this thread part of a simulated host, until the next call. None leaves it.
pub fn enter(host: Option<Arc<dyn SimulatedHost>>) {
    ENTERED.set(host);
}

/// The simulated host of this thread.
pub(crate) fn entered() -> Option<Arc<dyn SimulatedHost>> {
    ENTERED.with_borrow(Option::clone)
}

/// A random number, which tells two processes or two attempts apart.
pub(crate) fn random() -> u64 {
    entered()
        .map_or_else(|| RandomState::new().hash_one((process::id(), SystemTime::now())), |host| host.random())
}

/// Time since 1970 by this host's clock.
pub(crate) fn unix() -> Duration {
    entered().map_or_else(|| UNIX_EPOCH.elapsed().unwrap_or_default(), |host| host.now())
}

/// A moment of this host's monotonic clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Instant {
    Real(time::Instant),
    Simulated(Duration),
}

impl Instant {
    pub(crate) fn now() -> Instant {
        entered().map_or_else(|| Instant::Real(time::Instant::now()), |host| Instant::Simulated(host.now()))
    }

    pub(crate) fn elapsed(self) -> Duration {
        Instant::now().duration_since(self)
    }

    pub(crate) fn duration_since(self, earlier: Instant) -> Duration {
        match (self, earlier) {
            (Instant::Real(later), Instant::Real(earlier)) => later.saturating_duration_since(earlier),
            (Instant::Simulated(later), Instant::Simulated(earlier)) => later.saturating_sub(earlier),
            _ => Duration::ZERO,
        }
    }
}

impl Add<Duration> for Instant {
    type Output = Instant;

    fn add(self, time: Duration) -> Instant {
        match self {
            Instant::Real(at) => Instant::Real(at + time),
            Instant::Simulated(at) => Instant::Simulated(at + time),
        }
    }
}

impl Sub<Duration> for Instant {
    type Output = Instant;

    fn sub(self, time: Duration) -> Instant {
        match self {
            Instant::Real(at) => Instant::Real(at - time),
            Instant::Simulated(at) => Instant::Simulated(at.saturating_sub(time)),
        }
    }
}

/// The end of a wait without its result.
#[derive(Debug)]
pub(crate) struct Elapsed;

pub(crate) async fn sleep_until(at: Instant) {
    match (at, entered()) {
        (Instant::Simulated(at), Some(host)) => host.sleep_until(at).await,
        (Instant::Real(at), _) => tokio::time::sleep_until(at.into()).await,
        _ => {}
    }
}

pub(crate) async fn sleep(time: Duration) {
    sleep_until(Instant::now() + time).await;
}

pub(crate) async fn timeout_at<T>(end: Instant, future: impl Future<Output = T>) -> Result<T, Elapsed> {
    tokio::select! {
        biased;
        value = future => Ok(value),
        () = sleep_until(end) => Err(Elapsed),
    }
}

pub(crate) async fn timeout<T>(time: Duration, future: impl Future<Output = T>) -> Result<T, Elapsed> {
    timeout_at(Instant::now() + time, future).await
}
