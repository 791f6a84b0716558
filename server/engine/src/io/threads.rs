//! The fallback: a few threads with pread and pwrite, where io_uring is refused.

use std::{
    fs::File,
    io,
    os::unix::fs::FileExt,
    sync::{Arc, Mutex, mpsc},
    thread::{self, JoinHandle},
};

use super::{Direction, Request};
use crate::lock;

/// Number of threads, each of which moves one request at a time. A single thread already reaches a device's
/// throughput with transfers of some MiB. Four keep several queues busy and let a write run beside reads.
const THREADS: usize = 4;
/// Bytes in one call: enough that the call's own cost does not show. The kernel splits them as the device
/// likes.
const CALL_BYTES: usize = 4 * 1024 * 1024;

pub(super) struct Threads {
    queue: Option<mpsc::Sender<Request>>,
    threads: Vec<JoinHandle<()>>,
    pub(super) why: String,
}

impl Threads {
    pub(super) fn start(file: &Arc<File>, why: String) -> io::Result<Threads> {
        let (queue, inbox) = mpsc::channel::<Request>();
        let inbox = Arc::new(Mutex::new(inbox));
        let mut threads = Vec::with_capacity(THREADS);
        for index in 0..THREADS {
            let (file, inbox) = (Arc::clone(file), Arc::clone(&inbox));
            let thread = thread::Builder::new().name(format!("disk-{index}"));
            threads.push(thread.spawn(move || work(&file, &inbox))?);
        }
        Ok(Threads { queue: Some(queue), threads, why })
    }

    pub(super) fn submit(&self, request: Request) {
        // The send cannot fail, since the threads live until the sender is dropped.
        if let Some(queue) = &self.queue {
            let _ = queue.send(request);
        }
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.queue = None;
        for thread in self.threads.drain(..) {
            // A request's `done` may hold the last reference to the disk. This code then runs on one of the disk's
            // threads, which cannot join itself.
            if thread.thread().id() != thread::current().id() {
                let _ = thread.join();
            }
        }
    }
}

fn work(file: &File, inbox: &Mutex<mpsc::Receiver<Request>>) {
    loop {
        let received = lock(inbox).recv();
        let Ok(Request { direction, parts, mut buffer, done }) = received else { return };
        let result = parts.iter().try_for_each(|part| {
            let bytes = &mut buffer.bytes_mut()[part.range.clone()];
            for (index, piece) in bytes.chunks_mut(CALL_BYTES).enumerate() {
                let offset = part.offset + (index * CALL_BYTES) as u64;
                match direction {
                    Direction::Read => file.read_exact_at(piece, offset)?,
                    Direction::Write => file.write_all_at(piece, offset)?,
                }
            }
            Ok(())
        });
        done(buffer, result);
    }
}
