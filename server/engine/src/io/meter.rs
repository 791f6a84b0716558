//! Counts of the drives' requests and their latencies, for charts.
//!
//! A request costs two readings of the clock and some counters: 0.2 us, where a drive takes at least 100.

use std::{
    io,
    ops::Range,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use super::{Direction, Disk, OpenDisk, Request};

/// The upper ends of the latency buckets. Longer latencies are counted in a bucket behind the last.
pub const LATENCIES: [Duration; 14] = [
    Duration::from_micros(100),
    Duration::from_micros(250),
    Duration::from_micros(500),
    Duration::from_millis(1),
    Duration::from_micros(2500),
    Duration::from_millis(5),
    Duration::from_millis(10),
    Duration::from_millis(25),
    Duration::from_millis(50),
    Duration::from_millis(100),
    Duration::from_millis(250),
    Duration::from_millis(500),
    Duration::from_secs(1),
    Duration::from_secs(10),
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    Read,
    Write,
    Flush,
}

impl Operation {
    pub const ALL: [Operation; 3] = [Operation::Read, Operation::Write, Operation::Flush];

    pub fn name(self) -> &'static str {
        match self {
            Operation::Read => "read",
            Operation::Write => "write",
            Operation::Flush => "flush",
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    /// Number of finished requests in each bucket of [`LATENCIES`]. The last count is of longer requests.
    pub latencies: [u64; LATENCIES.len() + 1],
    pub time: Duration,
    pub bytes: u64,
    /// Number of requests without an answer.
    pub under_way: u64,
}

#[derive(Default)]
struct Counts {
    latencies: [AtomicU64; LATENCIES.len() + 1],
    nanos: AtomicU64,
    bytes: AtomicU64,
    begun: AtomicU64,
    ended: AtomicU64,
}

impl Counts {
    fn end(&self, bytes: u64, took: Duration) {
        let at = LATENCIES.iter().position(|most| took <= *most).unwrap_or(LATENCIES.len());
        self.latencies[at].fetch_add(1, Relaxed);
        self.nanos.fetch_add(took.as_nanos() as u64, Relaxed);
        self.bytes.fetch_add(bytes, Relaxed);
        self.ended.fetch_add(1, Relaxed);
    }

    fn counted(&self) -> Counted {
        // Ended requests are read before begun ones, so that no more have ended than begun.
        let ended = self.ended.load(Relaxed);
        Counted {
            latencies: self.latencies.each_ref().map(|count| count.load(Relaxed)),
            time: Duration::from_nanos(self.nanos.load(Relaxed)),
            bytes: self.bytes.load(Relaxed),
            under_way: self.begun.load(Relaxed).saturating_sub(ended),
        }
    }
}

/// The counts of a server's drives, one for each folder that state is striped over.
pub struct Drives(Vec<(PathBuf, Arc<[Counts; 3]>)>);

impl Drives {
    pub fn new(folders: &[PathBuf]) -> Drives {
        Drives(folders.iter().map(|folder| (folder.clone(), Arc::default())).collect())
    }

    /// The counts of each folder, in the order of [`Operation::ALL`].
    pub fn counted(&self) -> impl Iterator<Item = (&Path, [Counted; 3])> {
        self.0.iter().map(|(folder, counts)| (folder.as_path(), counts.each_ref().map(Counts::counted)))
    }

    fn of(&self, path: &Path) -> Option<&Arc<[Counts; 3]>> {
        self.0.iter().find(|(folder, _)| path.starts_with(folder)).map(|(_, counts)| counts)
    }
}

/// Opens files by another opener, and counts the requests to files in the drives' folders.
pub(crate) struct Metered {
    pub(crate) opener: Arc<dyn OpenDisk>,
    pub(crate) drives: Arc<Drives>,
}

impl Metered {
    fn counted(&self, disk: Arc<dyn Disk>) -> Arc<dyn Disk> {
        match self.drives.of(disk.path()) {
            Some(counts) => Arc::new(Counting { counts: Arc::clone(counts), disk }),
            None => disk,
        }
    }
}

impl OpenDisk for Metered {
    fn create(&self, path: &Path) -> io::Result<Arc<dyn Disk>> {
        self.opener.create(path).map(|disk| self.counted(disk))
    }

    fn open(&self, path: &Path) -> io::Result<Arc<dyn Disk>> {
        self.opener.open(path).map(|disk| self.counted(disk))
    }
}

struct Counting {
    disk: Arc<dyn Disk>,
    counts: Arc<[Counts; 3]>,
}

impl Disk for Counting {
    fn path(&self) -> &Path {
        self.disk.path()
    }

    fn reserve(&self, range: Range<u64>) -> io::Result<()> {
        self.disk.reserve(range)
    }

    fn give_back(&self, range: Range<u64>) -> io::Result<()> {
        self.disk.give_back(range)
    }

    fn submit(&self, request: Request) {
        let Request { direction, parts, buffer, done } = request;
        let operation = match direction {
            Direction::Read => Operation::Read,
            Direction::Write => Operation::Write,
        };
        let bytes: usize = parts.iter().map(|part| part.range.len()).sum();
        let counts = Arc::clone(&self.counts);
        counts[operation as usize].begun.fetch_add(1, Relaxed);
        let begun = Instant::now();
        let done = Box::new(move |buffer, result| {
            counts[operation as usize].end(bytes as u64, begun.elapsed());
            done(buffer, result);
        });
        self.disk.submit(Request { direction, parts, buffer, done });
    }

    fn flush(&self) -> io::Result<()> {
        let counts = &self.counts[Operation::Flush as usize];
        counts.begun.fetch_add(1, Relaxed);
        let begun = Instant::now();
        let flushed = self.disk.flush();
        counts.end(0, begun.elapsed());
        flushed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_counted_while_it_lasts_and_after_below_its_latency_s_upper_end() {
        let counts = Counts::default();
        (0..4).for_each(|_| _ = counts.begun.fetch_add(1, Relaxed));
        counts.end(1, Duration::from_micros(100));
        counts.end(2, Duration::from_micros(101));
        counts.end(3, Duration::from_secs(11));
        let counted = counts.counted();
        assert_eq!((counted.latencies[0], counted.latencies[1]), (1, 1));
        assert_eq!((counted.latencies[LATENCIES.len()], counted.bytes, counted.under_way), (1, 6, 1));
    }
}
