//! Aligned reads and writes of one file on threads of their own. Tiers submit requests, and compute never waits in a
//! system call.
//!
//! A [`Disk`] is a file. io_uring serves it where the kernel allows that. A container's default seccomp profile forbids
//! io_uring; a few threads then call pread and pwrite. A request owns its buffer until it is done, so no caller can
//! free memory that the device still reads or writes. In tests a simulated disk loses, tears and reorders writes.

mod file;
mod meter;
mod threads;
mod uring;

use std::{
    fmt, io,
    ops::Range,
    path::Path,
    sync::{
        Arc,
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::Duration,
};

pub use file::OpenFile;
pub(crate) use meter::Metered;
pub use meter::{Counted, Drives, LATENCIES, Operation};

use crate::memory::Region;

/// Offsets and lengths are multiples of this. Every known device takes 4 KiB; a device that wants more is read and
/// written through the page cache.
pub const FILE_ALIGN: u64 = 4096;

/// The longest single transfer handed to the kernel. Devices peak at 1 MiB. A longer transfer would not fit one bio of
/// 4 KiB pages, and io_uring would hand it to a worker thread.
pub(crate) const TRANSFER_BYTES: usize = 1024 * 1024;
/// A device without an answer for this time has failed. The kernel's own timeout for NVMe is 30 s, with
/// retries.
pub(crate) const SILENCE: Duration = Duration::from_secs(180);
/// Number of transfers that one disk has in flight. Any depth from 4 on gave the same throughput; 32 covers
/// several NVMe queues.
pub(crate) const QUEUE_DEPTH: u32 = 32;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    Read,
    Write,
}

/// A range of the buffer and its offset in the file. Both ends are multiples of [`FILE_ALIGN`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    pub offset: u64,
    pub range: Range<usize>,
}

/// Receives the buffer back, and an error if a part was not transferred whole.
pub type Done = Box<dyn FnOnce(Region, io::Result<()>) + Send>;

pub struct Request {
    pub direction: Direction,
    pub parts: Vec<Part>,
    pub buffer: Region,
    /// Called once, on a thread of the disk. Must be short.
    pub done: Done,
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Request").field("direction", &self.direction).field("parts", &self.parts).finish()
    }
}

/// A file. Dropping it waits for all submitted requests.
pub trait Disk: Send + Sync {
    fn path(&self) -> &Path;

    /// Reserves space, so that no write in the middle of training finds the disk full. A second call for the same range
    /// changes nothing.
    fn reserve(&self, range: Range<u64>) -> io::Result<()>;

    /// Gives the space of a range back. The range reads as zeros.
    fn give_back(&self, range: Range<u64>) -> io::Result<()>;

    /// Starts a request. Requests in flight may be done in any order.
    fn submit(&self, request: Request);

    /// Makes all writes that were done before the call survive a power failure. After an error the writes may be lost.
    /// A second flush would report a false success: the kernel forgets pages that failed.
    fn flush(&self) -> io::Result<()>;
}

/// Opener of disks: files, or in tests a simulation.
pub trait OpenDisk: Send + Sync {
    /// Creates an empty file. After an error no file is left behind.
    fn create(&self, path: &Path) -> io::Result<Arc<dyn Disk>>;

    fn open(&self, path: &Path) -> io::Result<Arc<dyn Disk>>;
}

/// System calls that move the bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Engine {
    /// io_uring if a probe of it works, otherwise threads.
    #[default]
    Auto,
    Uring,
    Threads,
}

/// Runs one request to its end, for records and tables. If the device is silent for `SILENCE`, the disk keeps the
/// buffer.
pub(crate) fn transfer(
    disk: &dyn Disk,
    direction: Direction,
    parts: Vec<Part>,
    buffer: Region,
) -> (Option<Region>, io::Result<()>) {
    transfer_within(SILENCE, disk, direction, parts, buffer)
}

fn transfer_within(
    patience: Duration,
    disk: &dyn Disk,
    direction: Direction,
    parts: Vec<Part>,
    buffer: Region,
) -> (Option<Region>, io::Result<()>) {
    let (sender, receiver) = mpsc::channel();
    let done = Box::new(move |buffer: Region, result: io::Result<()>| {
        let _ = sender.send((buffer, result));
    });
    disk.submit(Request { direction, parts, buffer, done });
    match receiver.recv_timeout(patience) {
        Ok((buffer, result)) => (Some(buffer), result),
        Err(error) => (None, Err(unanswered(error, patience))),
    }
}

fn unanswered(error: RecvTimeoutError, patience: Duration) -> io::Error {
    match error {
        RecvTimeoutError::Disconnected => io::Error::other("the disk's thread has ended"),
        RecvTimeoutError::Timeout => {
            io::Error::new(io::ErrorKind::TimedOut, format!("silent for {} s", patience.as_secs()))
        }
    }
}

/// Flushes a disk. If the device is silent for `SILENCE`, a thread goes on waiting for the device.
pub(crate) fn flush(disk: &Arc<dyn Disk>) -> io::Result<()> {
    flush_within(SILENCE, disk)
}

fn flush_within(patience: Duration, disk: &Arc<dyn Disk>) -> io::Result<()> {
    let (sender, receiver) = mpsc::channel();
    let disk = Arc::clone(disk);
    let flush = move || {
        let result = disk.flush();
        // The caller may close the disk once it has the result.
        drop(disk);
        let _ = sender.send(result);
    };
    thread::Builder::new().name("disk-flush".to_string()).spawn(flush)?;
    receiver.recv_timeout(patience).unwrap_or_else(|error| Err(unanswered(error, patience)))
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::memory::Slab;

    /// A drive that answers nothing.
    struct Silent(Mutex<Vec<Request>>);

    impl Disk for Silent {
        fn path(&self) -> &Path {
            Path::new("silent")
        }

        fn reserve(&self, _: Range<u64>) -> io::Result<()> {
            Ok(())
        }

        fn give_back(&self, _: Range<u64>) -> io::Result<()> {
            Ok(())
        }

        fn submit(&self, request: Request) {
            crate::lock(&self.0).push(request);
        }

        fn flush(&self) -> io::Result<()> {
            thread::sleep(Duration::from_millis(200));
            Ok(())
        }
    }

    #[test]
    fn a_transfer_of_a_silent_drive_fails_and_leaves_the_drive_its_buffer() {
        let page = FILE_ALIGN as usize;
        let buffer = Slab::allocate(page).unwrap().carve_here(&[page]).remove(0);
        let (disk, parts) = (Silent(Mutex::default()), vec![Part { offset: 0, range: 0..page }]);
        let (kept, result) = transfer_within(Duration::ZERO, &disk, Direction::Write, parts, buffer);
        assert_eq!((kept.is_none(), result.unwrap_err().kind()), (true, io::ErrorKind::TimedOut));
        assert_eq!(crate::lock(&disk.0)[0].buffer.bytes().len(), page);
    }

    #[test]
    fn a_flush_of_a_silent_drive_fails() {
        let disk: Arc<dyn Disk> = Arc::new(Silent(Mutex::default()));
        let fault = flush_within(Duration::from_millis(1), &disk).unwrap_err();
        assert_eq!((fault.kind(), &*fault.to_string()), (io::ErrorKind::TimedOut, "silent for 0 s"));
        flush(&disk).unwrap();
    }
}
