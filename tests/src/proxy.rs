//! A TCP proxy in front of a server. A test limits the rate, or ends all connections.

use std::{
    io::{Read, Write},
    net::{Ipv4Addr, Shutdown, TcpListener, TcpStream},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use crate::{process::DEADLINE, server::Longshored};

/// Bytes that are passed on at once. A push has many such pieces, so a limited rate slows all of it.
const PIECE_BYTES: usize = 8 * 1024;
/// Interval at which a test looks at the bytes passed.
const POLL: Duration = Duration::from_millis(2);

/// A proxy. Drop ends it and every connection through it.
pub struct Proxy {
    address: String,
    line: Arc<Line>,
}

/// State that all connections share.
struct Line {
    target: String,
    /// Bytes a second towards the server; 0 means no limit.
    rate: AtomicU64,
    /// Bytes passed on towards the server so far.
    passed: AtomicU64,
    /// The instant at which the line has sent all bytes accepted so far.
    busy_until: Mutex<Instant>,
    ended: AtomicBool,
}

impl Proxy {
    pub fn before(server: &Longshored) -> Proxy {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port of loopback");
        let address = listener.local_addr().expect("its address").to_string();
        let line = Arc::new(Line {
            target: server.address().to_string(),
            rate: AtomicU64::new(0),
            passed: AtomicU64::new(0),
            busy_until: Mutex::new(Instant::now()),
            ended: AtomicBool::new(false),
        });
        let accepting = Arc::clone(&line);
        thread::spawn(move || {
            while let Ok((worker, _)) = listener.accept() {
                if accepting.ended.load(Relaxed) {
                    return;
                }
                accepting.join(worker);
            }
        });
        Proxy { address, line }
    }

    pub fn address(&self) -> &str {
        &self.address
    }

    /// Limits the bytes a second towards the server, over all connections together; 0 means no limit.
    pub fn slow_to(&self, rate: u64) {
        self.line.rate.store(rate, Relaxed);
    }

    /// Waits until `bytes` more bytes have gone towards the server.
    ///
    /// # Panics If the deadline passes before.
    pub fn until_passed(&self, bytes: u64) {
        let (start, from) = (Instant::now(), self.line.passed.load(Relaxed));
        while self.line.passed.load(Relaxed) < from + bytes {
            assert!(start.elapsed() < DEADLINE, "{bytes} bytes have not passed within {DEADLINE:?}");
            thread::sleep(POLL);
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.line.ended.store(true, Relaxed);
        // Connecting wakes the thread that accepts.
        drop(TcpStream::connect(&self.address));
    }
}

impl Line {
    /// Joins a worker with the server. Closes the connection if the server is not there, as a load balancer
    /// does.
    fn join(self: &Arc<Self>, worker: TcpStream) {
        let Ok(server) = TcpStream::connect(&self.target) else { return };
        let _ = (worker.set_nodelay(true), server.set_nodelay(true));
        for (from, to, forth) in [(&worker, &server, true), (&server, &worker, false)] {
            let (Ok(from), Ok(to)) = (from.try_clone(), to.try_clone()) else { return };
            let line = Arc::clone(self);
            thread::spawn(move || {
                line.pass(&from, &to, forth);
                let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
            });
        }
    }

    /// Passes bytes on until the end of either connection.
    fn pass(&self, mut from: &TcpStream, mut to: &TcpStream, forth: bool) {
        let mut piece = [0; PIECE_BYTES];
        while let Ok(count @ 1..) = from.read(&mut piece) {
            if forth {
                self.take_turn(count as u64);
            }
            if self.ended.load(Relaxed) || to.write_all(&piece[..count]).is_err() {
                return;
            }
            if forth {
                self.passed.fetch_add(count as u64, Relaxed);
            }
        }
    }

    /// Waits for this piece's time at the line's rate, behind the pieces of other connections.
    fn take_turn(&self, bytes: u64) {
        let rate = self.rate.load(Relaxed);
        if rate == 0 {
            return;
        }
        let mut busy_until = self.busy_until.lock().unwrap_or_else(PoisonError::into_inner);
        let end =
            (*busy_until).max(Instant::now()) + Duration::from_secs(1).mul_f64(bytes as f64 / rate as f64);
        *busy_until = end;
        drop(busy_until);
        thread::sleep(end.saturating_duration_since(Instant::now()));
    }
}
