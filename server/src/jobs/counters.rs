//! Counters of a job for status, page and metrics, since the job was opened here. Counted are the busy time of its
//! compute thread, payload bytes, the pace of steps, and the last checkpoint.

use std::{
    sync::{
        Mutex,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant, UNIX_EPOCH},
};

use longshore_engine::step::Work;
use longshore_proto::{Fault, FaultKind, Rank, Version};
use longshore_wire::v1;

use crate::lock::lock;

/// Busy time of the compute thread by kind of work, and the length of its queue. Two clock reads cost 50 ns, and a
/// work takes milliseconds.
#[derive(Default)]
pub(crate) struct Busy {
    sums: AtomicU64,
    updates: AtomicU64,
    /// Works in the compute thread's own queue.
    queued: AtomicUsize,
    /// Works sent to the compute thread and not yet received.
    handed: AtomicUsize,
}

impl Busy {
    /// Runs `perform` and counts its time by the kind of `next`, the first queued work.
    pub(super) fn count<T>(&self, next: &Work, perform: impl FnOnce() -> T) -> T {
        let nanos = match next {
            Work::Update { .. } => &self.updates,
            Work::Sum(_) => &self.sums,
        };
        let started = Instant::now();
        let done = perform();
        nanos.fetch_add(started.elapsed().as_nanos() as u64, Relaxed);
        done
    }

    pub(crate) fn sums(&self) -> Duration {
        Duration::from_nanos(self.sums.load(Relaxed))
    }

    /// Returns the time spent in updates. On `nvme` the time includes waits for drives.
    pub(crate) fn updates(&self) -> Duration {
        Duration::from_nanos(self.updates.load(Relaxed))
    }

    pub(super) fn handed(&self) {
        self.handed.fetch_add(1, Relaxed);
    }

    pub(super) fn taken(&self) {
        self.handed.fetch_sub(1, Relaxed);
    }

    pub(super) fn has(&self, works: usize) {
        self.queued.store(works, Relaxed);
    }

    /// Returns the number of works that wait for the compute thread or run there.
    pub(crate) fn queued(&self) -> u64 {
        (self.queued.load(Relaxed) + self.handed.load(Relaxed)) as u64
    }
}

/// Transports of payloads.
const TRANSPORTS: [&str; 4] = ["tcp", "tls", "unix", "memfd"];
/// Number of ranks that have samples of their own in the metrics. In a larger job the counts of ranks by state show a
/// missing rank, and `longshore status` names it.
pub(crate) const RANKS: usize = 64;

type Counts = [AtomicU64; TRANSPORTS.len()];

/// Payload bytes of a job's first ranks since the job was opened here. Each chunk or slice, mostly 1 MiB, costs one
/// addition.
#[derive(Default)]
pub(crate) struct Traffic {
    pushed: Vec<Counts>,
    pulled: Vec<Counts>,
}

impl Traffic {
    pub(super) fn new(world_size: u32) -> Traffic {
        let counts = || (0..RANKS.min(world_size as usize)).map(|_| Counts::default()).collect();
        Traffic { pushed: counts(), pulled: counts() }
    }

    pub(crate) fn pushed(&self, rank: Rank, transport: &str, bytes: u64) {
        add(&self.pushed, rank, transport, bytes);
    }

    pub(crate) fn pulled(&self, rank: Rank, transport: &str, bytes: u64) {
        add(&self.pulled, rank, transport, bytes);
    }

    /// Yields rank, transport and bytes, for nonzero counts.
    pub(crate) fn all_pushed(&self) -> impl Iterator<Item = (usize, &'static str, u64)> {
        counted(&self.pushed)
    }

    pub(crate) fn all_pulled(&self) -> impl Iterator<Item = (usize, &'static str, u64)> {
        counted(&self.pulled)
    }
}

fn add(ranks: &[Counts], rank: Rank, transport: &str, bytes: u64) {
    let counts = ranks.get(rank.index());
    let at = TRANSPORTS.iter().position(|known| *known == transport);
    if let Some(count) = counts.zip(at).map(|(counts, at)| &counts[at]) {
        count.fetch_add(bytes, Relaxed);
    }
}

fn counted(ranks: &[Counts]) -> impl Iterator<Item = (usize, &'static str, u64)> {
    ranks.iter().enumerate().flat_map(|(rank, counts)| {
        let counts =
            TRANSPORTS.iter().zip(counts).map(|(transport, count)| (*transport, count.load(Relaxed)));
        counts.filter(|(_, bytes)| *bytes > 0).map(move |(transport, bytes)| (rank, transport, bytes))
    })
}

/// First and last decided step, for the forecast of drive wear.
#[derive(Default)]
pub(crate) struct Pace {
    first_and_last: Mutex<Option<(Mark, Mark)>>,
}

#[derive(Clone, Copy)]
struct Mark {
    at: Instant,
    step: u64,
    written: u64,
}

/// Difference between the first and the last mark.
#[derive(Default)]
pub(crate) struct Span {
    pub(crate) steps: u64,
    pub(crate) time: Duration,
    pub(crate) written: u64,
}

impl Pace {
    /// Records a decided step. `written` counts the bytes written to drives so far.
    pub(crate) fn decided(&self, step: u64, written: u64) {
        let now = Mark { at: Instant::now(), step, written };
        let mut marks = lock(&self.first_and_last);
        *marks = Some((marks.map_or(now, |(first, _)| first), now));
    }

    pub(crate) fn span(&self) -> Span {
        let marks = *lock(&self.first_and_last);
        marks.map_or_else(Span::default, |(first, last)| Span {
            steps: last.step - first.step,
            time: last.at - first.at,
            written: last.written.saturating_sub(first.written),
        })
    }
}

/// Result of the last checkpoint; None until one was tried. `longshore status` shows it without reading any disk.
#[derive(Default)]
pub(crate) struct CheckpointLog(Mutex<Option<v1::CheckpointStatus>>);

impl CheckpointLog {
    pub(crate) fn sealed(&self, name: &str, version: Version) {
        let status = v1::CheckpointStatus {
            name: name.to_string(),
            version: version.0,
            sealed_unix_ms: now(),
            ..Default::default()
        };
        *lock(&self.0) = Some(status);
    }

    /// Records a failure. A version that has passed or a name that is taken does not count: the caller retries with
    /// another.
    pub(crate) fn failed(&self, job: &str, name: &str, fault: &Fault) {
        if fault.field == "version" || fault.kind == FaultKind::Conflict {
            return;
        }
        let fault = fault.cut();
        tracing::warn!(job, name, %fault, "no checkpoint written");
        let mut status = lock(&self.0);
        let status = status.get_or_insert_default();
        (status.failure, status.failed_unix_ms) = (fault.to_string(), now());
    }

    pub(crate) fn last(&self) -> Option<v1::CheckpointStatus> {
        lock(&self.0).clone()
    }
}

fn now() -> u64 {
    UNIX_EPOCH.elapsed().map_or(0, |since| since.as_millis() as u64)
}
