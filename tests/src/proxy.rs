//! A TCP proxy in front of a server. A test sets the network's rate and lag, or stops it.

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

/// Bytes passed on at once: few compared with a push, so a slow network is slow throughout.
const PIECE_BYTES: usize = 8 * 1024;
/// Interval at which a stopped network checks whether it has been restarted.
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
    /// Delay of bytes towards the server, in microseconds.
    lag: AtomicU64,
    /// Bytes passed on towards the server so far.
    passed: AtomicU64,
    /// The instant at which the line has sent all bytes accepted so far.
    busy_until: Mutex<Instant>,
    /// Towards the server, and back.
    stopped: [AtomicBool; 2],
    ended: AtomicBool,
}

/// The instant at which a piece is due, and its bytes.
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
            stopped: Default::default(),
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

    /// Sets the delay of bytes towards the server.
    pub fn lag(&self, lag: Duration) {
        self.line.lag.store(lag.as_micros() as u64, Relaxed);
    }

    /// Stops both directions. Connections stay open.
    pub fn stop(&self) {
        self.stop_ways([true, true]);
    }

    /// Stops the way towards the server, the way back, or both.
    pub fn stop_ways(&self, ways: [bool; 2]) {
        self.line.stopped.iter().zip(ways).for_each(|(stopped, stop)| stopped.store(stop, Relaxed));
    }

    pub fn go_on(&self) {
        self.stop_ways([false, false]);
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

    /// Reads bytes from a connection until its end, or until the receiver of `under_way` is gone.
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
            while self.stopped[usize::from(!forth)].load(Relaxed) && !self.ended.load(Relaxed) {
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
