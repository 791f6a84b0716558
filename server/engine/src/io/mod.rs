//! Aligned reads and writes of one file on dedicated threads, so that compute never waits in a system call.
//!
//! A [`Disk`] is a file. io_uring serves it where the kernel allows that. Default container
//! seccomp does not; a few threads then call pread and pwrite. In tests a simulated disk loses, tears and
//! reorders. A request owns its buffer until it is done. So nobody can free or reuse memory that the device
//! still reads or writes.

mod file;
mod meter;
mod threads;
mod uring;

use std::{
    fmt, io,
    ops::Range,
    path::Path,
    sync::{Arc, mpsc},
};

pub use file::OpenFile;
pub(crate) use meter::Metered;
pub use meter::{Counted, Drives, LATENCIES, Operation};

use crate::memory::Region;

/// Offsets and lengths are multiples of this. Every known device takes 4 KiB; a device that wants more is read and
/// written through the page cache.
pub const FILE_ALIGN: u64 = 4096;

/// The longest single transfer handed to the kernel. Devices peak at 1 MiB. A block device takes no more as one bio of
/// 4 KiB pages. So io_uring never hands the transfer to a worker thread.
pub(crate) const TRANSFER_BYTES: usize = 1024 * 1024;
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

/// Receives the buffer back, and the result: was every part transferred whole?
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

    /// Reserves space, so that a full disk is found here and not by a write in the middle of training. A second call for
    /// the same range changes nothing.
    fn reserve(&self, range: Range<u64>) -> io::Result<()>;

    /// Gives the space of a range back. The range reads as zeros.
    fn give_back(&self, range: Range<u64>) -> io::Result<()>;

    /// Starts a request. Requests in flight may be done in any order.
    fn submit(&self, request: Request);

    /// Makes all writes that were done before the call survive a power failure. After an error their state is
    /// unknown. A second flush would report a false success: the kernel forgets pages that it could not
    /// write.
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

/// Runs one request to its end. Meant for small things beside the data: records and tables.
pub(crate) fn transfer(
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
    match receiver.recv() {
        Ok((buffer, result)) => (Some(buffer), result),
        Err(_) => (None, Err(io::Error::other("the disk's thread has ended"))),
    }
}
