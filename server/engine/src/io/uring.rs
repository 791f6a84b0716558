//! io_uring, with one ring and one thread for each file. No other module names it.
//!
//! The thread owns a request, buffer included, until the request's last completion has come. The thread ends
//! only when nothing is in flight.
//!
//! Buffers are not registered: registration saved only a fifth of 0.006 CPU seconds a GB.

#![allow(unsafe_code)]

use std::{
    collections::VecDeque,
    fs::File,
    io,
    os::fd::{AsRawFd, OwnedFd},
    sync::{Arc, Mutex, mpsc},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use io_uring::{IoUring, opcode, squeue::Entry, types::Fd};
use rustix::{
    event::{EventfdFlags, eventfd},
    io::Errno,
};

use super::{Direction, FILE_ALIGN, QUEUE_DEPTH, Request, TRANSFER_BYTES};
use crate::{lock, memory::Slab};

/// Interval between lines of the log while the kernel takes no submission.
const REMINDER: Duration = Duration::from_secs(60);

/// Marks the completion by which the queue announces a request.
const WAKE: u64 = u64::MAX;

pub(super) struct Uring {
    shared: Arc<Inbox>,
    thread: Option<JoinHandle<()>>,
    pub(super) how: &'static str,
}

struct Inbox {
    queue: Mutex<Queue>,
    wake: OwnedFd,
}

#[derive(Default)]
struct Queue {
    requests: VecDeque<Request>,
    closed: bool,
}

/// A request whose transfers are under way.
struct Active {
    request: Request,
    /// Start of the next transfer: index of the part, and byte in the part.
    next: (usize, usize),
    in_flight: u32,
    error: Option<io::Error>,
}

#[derive(Clone, Copy)]
struct Transfer {
    active: usize,
    /// The offset in the file, and the range in the buffer.
    offset: u64,
    start: usize,
    len: usize,
}

struct Worker {
    ring: IoUring,
    file: Arc<File>,
    shared: Arc<Inbox>,
    waiting: VecDeque<Request>,
    active: Vec<Option<Active>>,
    transfers: Vec<Option<Transfer>>,
    free: Vec<usize>,
    /// Transfers that were cut short and go on later.
    again: Vec<Transfer>,
    wake_armed: bool,
}

impl Uring {
    /// Sets up the ring on the only thread that may use the ring, and probes it with a read.
    pub(super) fn start(file: &Arc<File>) -> io::Result<Uring> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let shared = Arc::new(Inbox { queue: Mutex::default(), wake });
        let (report, outcome) = mpsc::channel();
        let file = Arc::clone(file);
        let of_thread = Arc::clone(&shared);
        let thread =
            thread::Builder::new().name("disk-uring".to_string()).spawn(move || {
                match Worker::set_up(file, of_thread) {
                    Ok((mut worker, how)) => {
                        let _ = report.send(Ok(how));
                        worker.run();
                    }
                    Err(error) => {
                        let _ = report.send(Err(error));
                    }
                }
            })?;
        let ended = |_| Err(io::Error::other("the ring's thread ended"));
        let how = outcome.recv().unwrap_or_else(ended)?;
        Ok(Uring { shared, thread: Some(thread), how })
    }

    pub(super) fn submit(&self, mut request: Request) {
        request.parts.retain(|part| !part.range.is_empty());
        lock(&self.shared.queue).requests.push_back(request);
        self.wake();
    }

    fn wake(&self) {
        // A write fails only when the counter is full, and then the thread has been woken already.
        let _ = rustix::io::write(&self.shared.wake, &1u64.to_ne_bytes());
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        lock(&self.shared.queue).closed = true;
        self.wake();
        // A request's `done` may hold the last reference to the disk. This code then runs on the disk's thread, which
        // cannot join itself.
        if let Some(thread) =
            self.thread.take().filter(|thread| thread.thread().id() != thread::current().id())
        {
            let _ = thread.join();
        }
    }
}

/// Builds the newest kind of ring that this kernel knows. Each flag makes the ring cheaper, and none is needed.
fn build() -> io::Result<(IoUring, &'static str)> {
    let depth = QUEUE_DEPTH + 1;
    let mut builder = IoUring::builder();
    builder.dontfork().setup_clamp().setup_submit_all().setup_single_issuer().setup_defer_taskrun();
    match builder.build(depth) {
        Err(error) if error.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => {}
        built => return Ok((built?, "io_uring")),
    }
    let mut builder = IoUring::builder();
    builder.dontfork().setup_clamp().setup_submit_all().setup_coop_taskrun();
    match builder.build(depth) {
        Err(error) if error.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => {}
        built => return Ok((built?, "io_uring without deferred task work (Linux before 6.1)")),
    }
    Ok((IoUring::builder().dontfork().build(depth)?, "io_uring without flags (Linux before 5.19)"))
}

impl Worker {
    fn set_up(file: Arc<File>, shared: Arc<Inbox>) -> io::Result<(Worker, &'static str)> {
        let (ring, how) = build()?;
        let depth = QUEUE_DEPTH as usize;
        let mut worker = Worker {
            ring,
            file,
            shared,
            waiting: VecDeque::new(),
            active: Vec::new(),
            transfers: vec![None; depth],
            free: (0..depth).collect(),
            again: Vec::new(),
            wake_armed: false,
        };
        worker.probe()?;
        Ok((worker, how))
    }

    /// Probes with a real read, since some kernels and sandboxes give out a ring and refuse its operations.
    fn probe(&mut self) -> io::Result<()> {
        let slab = Slab::allocate(FILE_ALIGN as usize).map_err(|error| error.source)?;
        let mut buffer = slab.carve_here(&[FILE_ALIGN as usize]).remove(0);
        let fd = Fd(self.file.as_raw_fd());
        let read = opcode::Read::new(fd, buffer.bytes_mut().as_mut_ptr(), FILE_ALIGN as u32).build();
        // SAFETY: `buffer` lives until the completion below has come, and if none comes the thread does not go on.
        unsafe { self.ring.submission().push(&read) }.map_err(io::Error::other)?;
        loop {
            match self.ring.submit_and_wait(1) {
                Err(error) if error.raw_os_error() == Some(Errno::INTR.raw_os_error()) => continue,
                Err(error) => {
                    // The read may still be under way, so its page is leaked rather than freed.
                    std::mem::forget(buffer);
                    return Err(error);
                }
                Ok(_) => {}
            }
            if let Some(completion) = self.ring.completion().next() {
                let result = completion.result();
                return if result < 0 { Err(io::Error::from_raw_os_error(-result)) } else { Ok(()) };
            }
        }
    }

    fn run(&mut self) {
        let mut warned: Option<Instant> = None;
        loop {
            self.take_queue();
            self.start_transfers();
            let idle = self.free.len() == self.transfers.len();
            if idle && self.waiting.is_empty() && self.again.is_empty() && lock(&self.shared.queue).closed {
                if lock(&self.shared.queue).requests.is_empty() {
                    return;
                }
                continue;
            }
            self.arm_wake();
            match self.ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(error) if error.raw_os_error() == Some(Errno::INTR.raw_os_error()) => {}
                // The kernel lacks resources for the moment. Transfers in flight will free some.
                Err(error) => {
                    if warned.is_none_or(|at| at.elapsed() >= REMINDER) {
                        warned = Some(Instant::now());
                        tracing::warn!(%error, "io_uring took no submission");
                    }
                    thread::sleep(Duration::from_millis(1));
                }
            }
            self.complete();
        }
    }

    fn take_queue(&mut self) {
        let mut queue = lock(&self.shared.queue);
        self.waiting.extend(queue.requests.drain(..));
    }

    fn arm_wake(&mut self) {
        if self.wake_armed {
            return;
        }
        let poll = opcode::PollAdd::new(Fd(self.shared.wake.as_raw_fd()), libc::POLLIN as u32).build();
        // SAFETY: the descriptor lives in `shared`; a poll reads no memory of ours.
        self.wake_armed = unsafe { self.ring.submission().push(&poll.user_data(WAKE)) }.is_ok();
    }

    /// Fills the ring: first with transfers that were cut short, then with the parts of the requests in
    /// order.
    fn start_transfers(&mut self) {
        while !self.free.is_empty() {
            let next = self.again.pop().or_else(|| self.cut());
            let Some(transfer) = next else { return };
            self.push(transfer);
        }
    }

    /// Returns the next transfer of the active requests, or of the first waiting one.
    fn cut(&mut self) -> Option<Transfer> {
        for (index, active) in self.active.iter_mut().enumerate() {
            if let Some(transfer) = active.as_mut().and_then(|active| active.cut(index)) {
                return Some(transfer);
            }
        }
        let request = self.waiting.pop_front()?;
        let mut active = Active { request, next: (0, 0), in_flight: 0, error: None };
        let index = self.active.iter().position(Option::is_none).unwrap_or_else(|| {
            self.active.push(None);
            self.active.len() - 1
        });
        let transfer = active.cut(index);
        self.active[index] = Some(active);
        if transfer.is_none() {
            self.settle(index); // nothing to move
            return self.cut();
        }
        transfer
    }

    fn push(&mut self, transfer: Transfer) {
        let Some(slot) = self.free.pop() else { return };
        let Some(active) = self.active[transfer.active].as_mut() else { return };
        let bytes = &mut active.request.buffer.bytes_mut()[transfer.start..transfer.start + transfer.len];
        let entry = entry(self.file.as_raw_fd(), active.request.direction, bytes, transfer.offset);
        // SAFETY: the bytes belong to the request's buffer, which `active` owns until `in_flight` is 0 again: only
        // `settle` gives it away. The ring has room: it has more entries than `transfers`, and the wake's.
        let pushed = unsafe { self.ring.submission().push(&entry.user_data(slot as u64)) };
        active.in_flight += 1;
        self.transfers[slot] = Some(transfer);
        if pushed.is_err() {
            self.finish(slot, Err(io::Error::other("the ring is full")));
        }
    }

    fn complete(&mut self) {
        let completions: Vec<(u64, i32)> =
            self.ring.completion().map(|completion| (completion.user_data(), completion.result())).collect();
        for (data, result) in completions {
            if data == WAKE {
                self.wake_armed = false;
                let _ = rustix::io::read(&self.shared.wake, &mut [0; 8]);
                continue;
            }
            let moved =
                if result < 0 { Err(io::Error::from_raw_os_error(-result)) } else { Ok(result as usize) };
            self.finish(data as usize, moved);
        }
    }

    fn finish(&mut self, slot: usize, moved: io::Result<usize>) {
        let Some(transfer) = self.transfers[slot].take() else { return };
        self.free.push(slot);
        let Some(active) = self.active[transfer.active].as_mut() else { return };
        let again = |error: &io::Error| {
            let code = error.raw_os_error().map(Errno::from_raw_os_error);
            matches!(code, Some(Errno::INTR | Errno::AGAIN))
        };
        let rest = match moved {
            Ok(0) if active.request.direction == Direction::Read => {
                Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the file is shorter than it was made"))
            }
            Ok(0) => Err(io::Error::new(io::ErrorKind::WriteZero, "the device took nothing")),
            Ok(moved) if moved >= transfer.len => Ok(None),
            Ok(moved) => Ok(Some(Transfer {
                offset: transfer.offset + moved as u64,
                start: transfer.start + moved,
                len: transfer.len - moved,
                ..transfer
            })),
            Err(error) if again(&error) => Ok(Some(transfer)),
            Err(error) => Err(error),
        };
        active.in_flight -= 1;
        match rest {
            Ok(None) => {}
            Ok(Some(rest)) => self.again.push(rest),
            Err(error) => active.error = active.error.take().or(Some(error)),
        }
        self.settle(transfer.active);
    }

    /// Hands a request back once all of its transfers are done. A failed request is handed back once none of its
    /// transfers is in flight.
    fn settle(&mut self, index: usize) {
        let continued = self.again.iter().any(|transfer| transfer.active == index);
        let Some(active) = self.active[index].as_ref() else { return };
        let cut = active.error.is_some() || active.next.0 == active.request.parts.len();
        if active.in_flight > 0 || continued || !cut {
            return;
        }
        if let Some(Active { request, error, .. }) = self.active[index].take() {
            (request.done)(request.buffer, error.map_or(Ok(()), Err));
        }
    }
}

impl Active {
    fn cut(&mut self, index: usize) -> Option<Transfer> {
        if self.error.is_some() {
            return None;
        }
        let part = self.request.parts.get(self.next.0)?;
        let at = self.next.1;
        let len = (part.range.len() - at).min(TRANSFER_BYTES);
        let transfer =
            Transfer { active: index, offset: part.offset + at as u64, start: part.range.start + at, len };
        let whole = at + len == part.range.len();
        self.next = if whole { (self.next.0 + 1, 0) } else { (self.next.0, at + len) };
        Some(transfer)
    }
}

fn entry(fd: i32, direction: Direction, bytes: &mut [u8], offset: u64) -> Entry {
    let (start, len) = (bytes.as_mut_ptr(), bytes.len() as u32);
    match direction {
        Direction::Read => opcode::Read::new(Fd(fd), start, len).offset(offset).build(),
        Direction::Write => opcode::Write::new(Fd(fd), start, len).offset(offset).build(),
    }
}
