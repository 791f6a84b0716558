//! A job trains beside each flood, over TCP and over TLS, to the same bits. The server's memory stays within
//! its admitted jobs and the allowance of docs/limits.md for strangers.

use std::{
    collections::VecDeque,
    io::{self, Read, Write},
    sync::{
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use longshore_proto::limits::{OTHERS_CONNECTIONS, SPARE_CONNECTIONS, STRANGERS_BYTES, STRANGERS_TLS_BYTES};
use longshore_tests::{
    http::{self, FLAGS},
    peer::{
        CONTINUATION, DATA, END_HEADERS, END_STREAM, HEADERS, PING, Peer, RESET, SETTINGS, call_as, frame,
    },
    process::{DEADLINE, forget_peak, memory_of},
    server::ServerOptions,
    soak,
    train::{Run, Train},
};
use longshore_wire::{
    frame::encode,
    v1::{Dtype, PullRequest, Slice},
};
use rustix::process::setpriority_process;

use super::{
    mib,
    strangers::{Stop, Strangers, TOKEN},
};

const PUSH: &str = "/longshore.v1.Tensors/Push";
const PULL: &str = "/longshore.v1.Tensors/Pull";
/// A trained job that stays open: slow readers pull its weights.
const BEFORE: &str = "before";
/// Number of open calls of a slow reader.
const READS: u32 = 50;
/// Number of calls that the strangers of one address may begin at once. Each connection may have a dozen more.
const ADDRESS_CALLS: usize = 512;
/// Pause between strangers while a job trains: the test measures the flood's effect on the server, not the
/// processor time of making it.
const REST: Duration = Duration::from_millis(20);
/// Longest step that passes, in ms, with a margin for a busy machine. On a quiet machine it should stay under 1 s.
const LONGEST_MS: f64 = 3000.0;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Flood {
    /// Connections that stay open.
    Connections,
    /// Unfinished handshakes: TLS's, or HTTP/2's where there is no TLS.
    HalfOpen,
    /// Calls that are cancelled at once (CVE-2023-44487).
    RapidReset,
    /// Endless headers, and headers that are too long.
    GiantHeaders,
    /// Pulls from an ended job, by readers that take no weights.
    SlowReaders,
    /// Pulls of the training job's next versions, by readers that take no weights.
    SlowFollowers,
    /// Endless calls, pings and data.
    Frames,
}

impl Flood {
    const ALL: [Flood; 7] = [
        Flood::Connections,
        Flood::HalfOpen,
        Flood::RapidReset,
        Flood::GiantHeaders,
        Flood::SlowReaders,
        Flood::SlowFollowers,
        Flood::Frames,
    ];

    /// Returns the number of strangers at once.
    fn held(self) -> usize {
        match self {
            Flood::Connections | Flood::HalfOpen => soak::pick(300, 2000),
            Flood::GiantHeaders => soak::pick(100, 1000),
            // Some dozen strangers keep all their calls. The server ends the other strangers, which exceed their
            // address's limit.
            Flood::SlowReaders => soak::pick(16, 100),
            Flood::SlowFollowers => soak::pick(4, 100),
            Flood::RapidReset | Flood::Frames => 6,
        }
    }
}

trait Socket: Read + Write + Send {}
impl<T: Read + Write + Send> Socket for T {}
type Stranger = Peer<Box<dyn Socket>>;

fn boxed<S: Socket + 'static>(peer: Peer<S>) -> Stranger {
    Peer { socket: Box::new(peer.socket) }
}

/// A flooded server, and how strangers connect to it.
struct Target<'a> {
    address: &'a str,
    http: String,
    tls: Option<&'a Strangers>,
    /// The last version of the job [`BEFORE`].
    version: u64,
}

impl Target<'_> {
    /// Returns a stranger that has begun HTTP/2.
    fn guest(&self) -> io::Result<Stranger> {
        match self.tls {
            Some(strangers) => strangers.through(self.address).map(boxed),
            None => Peer::connect(self.address).map(boxed),
        }
    }

    fn half_open(&self) -> io::Result<Stranger> {
        if let Some(strangers) = self.tls {
            return strangers.come(self.address, Stop::HalfHello).map(boxed);
        }
        let mut peer = Peer::silent(self.address)?;
        peer.send(b"PRI * HTTP/2.0\r\n")?;
        Ok(boxed(peer))
    }

    fn headers(&self, flags: u8, stream: u32, path: &str) -> Vec<u8> {
        frame(HEADERS, flags, stream, &call_as(path, self.tls.map(|_| TOKEN)))
    }

    /// Returns the next stranger of a flood, with its frames sent. `turn` counts strangers; `at` is the
    /// training job's version.
    fn stranger(&self, flood: Flood, job: &str, turn: usize, at: u64) -> io::Result<Stranger> {
        if flood == Flood::HalfOpen {
            return self.half_open();
        }
        let mut guest = self.guest()?;
        let streams = |count: u32| (0..count).map(|index| 2 * index + 1);
        match flood {
            Flood::Connections | Flood::HalfOpen => {}
            Flood::RapidReset => {
                let pair =
                    |at| [self.headers(END_HEADERS, at, PUSH), frame(RESET, 0, at, &[0, 0, 0, 8])].concat();
                guest.flood(streams(5000).map(pair));
                assert!(!guest.is_alive(), "who takes calls back at once keeps the connection");
            }
            Flood::GiantHeaders => {
                // A continuation frame of 12 KiB keeps the server waiting for the headers' end. A hundred make the
                // server end the connection.
                let field = |index| format!("\0\x06name{index:02x}\x64{index:0>100}");
                let fields: String = (0..110).map(field).collect();
                let more = if turn.is_multiple_of(2) || turn < flood.held() { 1 } else { 100 };
                let more = (0..more).map(|_| frame(CONTINUATION, 0, 1, fields.as_bytes()));
                guest.flood([self.headers(0, 1, PUSH)].into_iter().chain(more));
            }
            Flood::SlowReaders | Flood::SlowFollowers => {
                // The window of a stream is 1000 bytes, and never grows.
                guest.send(&frame(SETTINGS, 0, 0, &[0, 4, 0, 0, 3, 232]))?;
                let call = |stream: u32| {
                    let pull = match flood {
                        Flood::SlowReaders => self.pull(BEFORE, self.version),
                        // The calls ask for the versions of about the next second, up to the job's last one.
                        _ => self.pull(job, self.version.min(at + u64::from(2 * stream))),
                    };
                    let pull = encode(&pull).head;
                    [self.headers(END_HEADERS, stream, PULL), frame(DATA, END_STREAM, stream, &pull)].concat()
                };
                guest.flood(streams(READS).map(call));
            }
            Flood::Frames => {
                match turn % 3 {
                    0 => guest.flood(streams(2000).map(|at| self.headers(END_HEADERS, at, PUSH))),
                    1 => guest.flood((0..200).map(|_| frame(PING, 0, 0, &[0; 8]).repeat(100))),
                    _ => {
                        let data = (0..100).map(|_| frame(DATA, 0, 1, &[0; 65_536]));
                        guest.flood([self.headers(END_HEADERS, 1, PUSH)].into_iter().chain(data))
                    }
                };
            }
        }
        Ok(guest)
    }

    fn pull(&self, job: &str, version: u64) -> PullRequest {
        PullRequest {
            job: job.into(),
            version,
            dtype: Dtype::Bf16.into(),
            slices: vec![Slice { shard: 0, offset: 0, elements: 65_536 }; 16],
            ..PullRequest::default()
        }
    }

    /// Brings the flood's strangers, signals `filled`, and then replaces the oldest ones until `over`.
    fn flood(&self, flood: Flood, job: &str, filled: &mpsc::Sender<()>, over: &AtomicBool) {
        // Strangers on another host would take none of the server's processor time, so these run at the lowest
        // priority.
        setpriority_process(None, 19).expect("a thread may be nicer");
        let mut held = VecDeque::new();
        let (mut came, mut fed, mut at) = (0, false, None);
        let follows = flood == Flood::SlowFollowers;
        for turn in 0.. {
            // The version is asked once a second, since the server takes 5 ms for metrics of a hundred jobs.
            if follows && (at.is_none() || turn % 50 == 0) {
                at = self.version_of(job);
            }
            // The server refuses pulls from a job that does not exist.
            if (!follows || at.is_some())
                && let Ok(stranger) = self.stranger(flood, job, turn, at.unwrap_or_default())
            {
                held.push_back(stranger);
                came += 1;
            }
            if turn + 1 == flood.held() && !follows {
                let _ = filled.send(());
            }
            if follows || turn + 1 >= flood.held() {
                thread::sleep(REST);
            }
            while held.len() >= flood.held() {
                let oldest = held.pop_front();
                fed |= follows && oldest.is_some_and(was_fed);
            }
            if over.load(Ordering::Relaxed) {
                break;
            }
        }
        fed |= follows && held.into_iter().any(was_fed);
        assert!(fed || !follows, "no weights were sent to any of {came} readers");
    }

    fn train(&self, job: &str) -> Run {
        let address = self.address.to_string();
        let train = Train::new(self.version).args(["--transport", "tcp", "--job", job]).servers(&[address]);
        match self.tls {
            Some(strangers) => {
                train.args(["--tls-dir", &strangers.folders.client("worker").display().to_string()]).run()
            }
            None => train.run(),
        }
    }

    /// Returns the memory that admission reserved for jobs.
    fn admitted(&self) -> u64 {
        http::metrics(&self.http)["longshore_memory_reserved_bytes"] as u64
    }

    /// Returns a job's version, or None before the job exists.
    fn version_of(&self, job: &str) -> Option<u64> {
        let is_its = |sample: &str| {
            sample.starts_with("longshore_job_version{") && sample.contains(&format!("job=\"{job}\""))
        };
        let found = http::metrics(&self.http).into_iter().find(|(sample, _)| is_its(sample));
        found.map(|(_, version)| version as u64)
    }

    fn connections(&self) -> f64 {
        http::metrics(&self.http)["longshore_connections"]
    }
}

/// Returns whether the server has sent some of a stranger's pulled weights.
fn was_fed(mut stranger: Stranger) -> bool {
    let _ = stranger.send(&frame(PING, 0, 0, &[1; 8]));
    while let Ok(Some(frame)) = stranger.next_frame() {
        match frame.kind {
            DATA => return true,
            PING => return false,
            _ => {}
        }
    }
    false
}

/// Drop ends the flood, also when the test panics.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn beside(target: &Target<'_>, flood: Flood, job: &str) -> Run {
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let ends = Ends(&over);
        let (filled, fills) = mpsc::channel();
        let flooding = scope.spawn(|| {
            let filled = filled;
            target.flood(flood, job, &filled, &over)
        });
        // Followers come only during the training, since they pull its next versions.
        if flood != Flood::SlowFollowers {
            fills.recv_timeout(2 * DEADLINE).expect("the strangers come");
        }
        let there = match flood {
            Flood::Connections => flood.held().min(SPARE_CONNECTIONS - OTHERS_CONNECTIONS),
            // A TLS handshake does not count as a connection yet. HTTP/2's preface comes on a connection that counts.
            Flood::HalfOpen if target.tls.is_some() => 0,
            // The server ends the other strangers of this address, beyond its limit of calls.
            Flood::SlowReaders => flood.held().min(ADDRESS_CALLS / READS as usize),
            Flood::HalfOpen | Flood::GiantHeaders => flood.held().min(SPARE_CONNECTIONS - OTHERS_CONNECTIONS),
            Flood::RapidReset | Flood::Frames | Flood::SlowFollowers => 0,
        };
        let connections = target.connections();
        assert!(
            connections >= 0.9 * there as f64,
            "{flood:?}: {connections} connections, {there} were to be held"
        );
        let run = target.train(job);
        drop(ends);
        flooding.join().unwrap();
        run
    })
}

fn training_goes_on(tls: Option<&Strangers>) {
    let options = ServerOptions::new().args(FLAGS).memory("4GiB").allow("all connections are taken");
    let server = match tls {
        Some(strangers) => options.tls(&strangers.folders.server()).start(),
        None => options.start(),
    };
    let (process, http) = (server.process.id(), http::address(&server));
    let target = Target { address: server.address(), http, tls, version: soak::pick(40, 400) };
    let (empty, _) = memory_of(process);
    let way = if tls.is_some() { "TLS" } else { "TCP" };
    let counted = STRANGERS_BYTES + if tls.is_some() { STRANGERS_TLS_BYTES } else { 0 };
    let undisturbed = target.train(BEFORE).end.state_hash;
    for flood in Flood::ALL {
        // During this run the calls of earlier strangers end, so that their address has its whole allowance again.
        target.train(&format!("before-{flood:?}"));
        forget_peak(process);
        let run = beside(&target, flood, &format!("beside-{flood:?}"));
        let beyond = memory_of(process).1.saturating_sub(empty + target.admitted());
        assert_eq!(run.end.state_hash, undisturbed, "{flood:?} over {way} changed the training");
        let longest = run.said.steps().skip(5).map(|step| step.step_ms).fold(0.0, f64::max);
        assert!(longest < LONGEST_MS, "{flood:?} over {way}: a step took {longest} ms");
        assert!(beyond < counted as u64, "{flood:?} over {way}: {} MiB, counted are {counted}", mib(beyond));
    }
}

#[test]
fn training_goes_on_beside_each_flood() {
    training_goes_on(None);
}

#[test]
fn training_over_tls_goes_on_beside_each_flood() {
    training_goes_on(Some(&Strangers::new()));
}
