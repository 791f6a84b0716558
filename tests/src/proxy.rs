//! A TCP proxy before a server, which makes the network slow or still under a test's control.

use std::{
    io::{Read, Write},
    net::{Ipv4Addr, Shutdown, TcpListener, TcpStream},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use crate::{process::DEADLINE, server::Longshored};

/// How much is passed on at once. It is small beside what a push sends, so that a slow network is slow all the time.
const PIECE_BYTES: usize = 8 * 1024;
/// The interval at which a stopped network checks whether it goes on.
const POLL: Duration = Duration::from_millis(2);

/// A proxy. It ends with the test, and every connection through it ends too.
pub struct Proxy {
    address: String,
    line: Arc<Line>,
}

/// What all its connections share.
struct Line {
    target: String,
    /// Bytes a second towards the server; 0 means as fast as they come.
    rate: AtomicU64,
    /// How long everything towards the server is on its way, in microseconds.
    lag: AtomicU64,
    /// Bytes that have gone towards the server.
    passed: AtomicU64,
    /// Until when the line is busy with what was sent.
    busy_until: Mutex<Instant>,
    stopped: AtomicBool,
    ended: AtomicBool,
}

/// When a piece is due, and its bytes.
type Piece = (Instant, Vec<u8>);

impl Proxy {
    pub fn before(server: &Longshored) -> Proxy {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port of loopback");
        let address = listener.local_addr().expect("its address").to_string();
        let line = Arc::new(Line {
            target: server.address().to_string(),
            rate: AtomicU64::new(0),
            lag: AtomicU64::new(0),
            passed: AtomicU64::new(0),
            busy_until: Mutex::new(Instant::now()),
            stopped: AtomicBool::new(false),
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

    /// Limits the bytes a second towards the server, over all connections together; 0 means as fast as they come.
    pub fn slow_to(&self, rate: u64) {
        self.line.rate.store(rate, Relaxed);
    }

    /// Sets how long everything towards the server is on its way.
    pub fn lag(&self, lag: Duration) {
        self.line.lag.store(lag.as_micros() as u64, Relaxed);
    }

    /// Lets nothing through any more, either way. Connections stay.
    pub fn stop(&self) {
        self.line.stopped.store(true, Relaxed);
    }

    pub fn go_on(&self) {
        self.line.stopped.store(false, Relaxed);
    }

    /// Waits until so many more bytes have gone towards the server.
    ///
    /// # Panics
    /// When they do not come in time.
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
        // This wakes the thread that accepts.
        drop(TcpStream::connect(&self.address));
    }
}

impl Line {
    /// Joins a worker with the server. If the server is not there, the connection is closed, as a load balancer does.
    fn join(self: &Arc<Self>, worker: TcpStream) {
        let Ok(server) = TcpStream::connect(&self.target) else { return };
        let _ = (worker.set_nodelay(true), server.set_nodelay(true));
        for (from, to, forth) in [(&worker, &server, true), (&server, &worker, false)] {
            let copies = (from.try_clone(), from.try_clone(), to.try_clone());
            let (Ok(mut source), Ok(from), Ok(to)) = copies else { return };
            let (under_way, pieces) = mpsc::channel();
            let (taking, delivering) = (Arc::clone(self), Arc::clone(self));
            thread::spawn(move || taking.take(&mut source, &under_way, forth));
            thread::spawn(move || {
                delivering.deliver(&to, &pieces, forth);
                let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
            });
        }
    }

    /// Takes bytes from a connection until its end, or until nobody delivers any more.
    fn take(&self, from: &mut TcpStream, under_way: &mpsc::Sender<Piece>, forth: bool) {
        let mut piece = [0; PIECE_BYTES];
        while let Ok(count @ 1..) = from.read(&mut piece) {
            let mut due = Instant::now();
            if forth {
                self.take_turn(count as u64);
                due += Duration::from_micros(self.lag.load(Relaxed));
            }
            if under_way.send((due, piece[..count].to_vec())).is_err() {
                return;
            }
        }
    }

    fn deliver(&self, mut to: &TcpStream, pieces: &mpsc::Receiver<Piece>, forth: bool) {
        for (due, piece) in pieces {
            thread::sleep(due.saturating_duration_since(Instant::now()));
            while self.stopped.load(Relaxed) && !self.ended.load(Relaxed) {
                thread::sleep(POLL);
            }
            if self.ended.load(Relaxed) || to.write_all(&piece).is_err() {
                return;
            }
            if forth {
                self.passed.fetch_add(piece.len() as u64, Relaxed);
            }
        }
    }

    /// Waits as long as these bytes take at the line's rate, after those of other connections.
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
