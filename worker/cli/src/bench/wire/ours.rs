//! Push and pull of a worker against a server in this process. A push goes from retained chunks into the server's
//! slots, and a pull from a version's image into a feed.

use std::{
    env,
    fs::{self, File, TryLockError},
    hash::{DefaultHasher, Hash, Hasher},
    hint::black_box,
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use anyhow::Context;
use longshore_proto::{
    JobName, JobSpec, Rank, Rule,
    checksum::Crc32,
    limits::{BLOCK_ELEMENTS, DEFAULT_SHARD_ELEMENTS},
};
use longshore_server::Config;
use longshore_worker::session::{Options, Probe, Session, Transport};

use super::{
    case::{Case, Sample},
    tls,
};
use crate::{
    access::Access,
    bench::{host::Host, job, param},
};

pub(super) fn cases(connections: usize, bytes: usize) -> anyhow::Result<Vec<Case>> {
    let host = Arc::new(Host::start(|_, defaults| Ok(defaults))?);
    let encrypted = Arc::new(Host::start(|folder, defaults| {
        tls::make(folder)?;
        Ok(Config { tls_dir: Some(folder.join(tls::SERVER)), ..defaults })
    })?);
    let elements = (bytes as u64 / 2).next_multiple_of(BLOCK_ELEMENTS);
    let mut cases = Vec::new();
    for (host, rank, transport, names) in [
        (&host, 0, Transport::Tcp, ["push tcp", "pull tcp", "raw tcp"]),
        (&encrypted, 0, Transport::Tcp, ["push tls", "pull tls", "raw tls"]),
        (&host, 1, Transport::Unix, ["push unix", "pull unix", "raw unix"]),
        (&host, 2, Transport::Memfd, ["push memfd", "read memfd", "memcpy"]),
    ] {
        let mut options = Options::new(vec![host.address(transport)], spec(elements)?, Rank(rank));
        (options.connections, options.transport) = (connections, transport);
        options.tls_dir = Some(host.folder().join(tls::WORKER)).filter(|folder| folder.exists());
        let link = Arc::new(Mutex::new(BenchRank::open(Some(host), options)?));
        let [push, pull, raw] = names;
        let (pushing, pulling) = (Arc::clone(&link), link);
        let lock = |link: &Mutex<BenchRank>| link.lock().unwrap_or_else(PoisonError::into_inner).push();
        cases.push(Case::new(push, Some(raw), move || lock(&pushing)));
        let lock = |link: &Mutex<BenchRank>| link.lock().unwrap_or_else(PoisonError::into_inner).pull();
        cases.push(Case::new(pull, Some(raw), move || lock(&pulling)));
    }
    Ok(cases)
}

/// Prefix of the name of a job that is opened on servers elsewhere.
pub(crate) const JOB: &str = "bench-wire-";

/// Bytes of a sample with servers elsewhere: few, since those servers may be busy with jobs. The job takes twelve times
/// as much of their memory.
const TO_BYTES: u64 = 64 << 20;

/// Bytes of a sample with a server in this process: too many for a cache, few enough for many rounds.
const BOTH_BYTES: u64 = 256 << 20;

/// The longest wait for another measurement of this host and user.
const OTHERS: Duration = Duration::from_secs(120);

/// Waits for other measurements of this host and user, and returns the name of the job on the servers. The next
/// run finds the job of a killed run by that name, and removes it. Other hosts use other names: in one job each
/// would fence the other.
fn turn() -> anyhow::Result<(String, File)> {
    const POLL: Duration = Duration::from_millis(100);
    let user = rustix::process::getuid().as_raw();
    let mut name = DefaultHasher::new();
    (fs::read("/proc/sys/kernel/hostname").unwrap_or_default(), user).hash(&mut name);
    let path = env::temp_dir().join(format!("longshore-{JOB}{user}.lock"));
    let file = File::options().create(true).append(true).open(&path);
    let file = file.with_context(|| format!("opening {}", path.display()))?;
    let begun = Instant::now();
    loop {
        match file.try_lock() {
            Ok(()) => return Ok((format!("{JOB}{:016x}", name.finish()), file)),
            Err(TryLockError::WouldBlock) if begun.elapsed() < OTHERS => thread::sleep(POLL),
            Err(TryLockError::WouldBlock) => {
                anyhow::bail!(
                    "another process of this host measures servers ({} is locked): try again when it has ended",
                    path.display()
                )
            }
            Err(TryLockError::Error(error)) => {
                return Err(error).with_context(|| format!("locking {}", path.display()));
            }
        }
    }
}

/// A rank's session, and the gradient that it pushes again and again. The job's other ranks never come, so servers form
/// no sum.
pub(in crate::bench) struct BenchRank {
    probe: Probe,
    /// None for servers elsewhere.
    _host: Option<Arc<Host>>,
    /// The lock of this host's turn on servers elsewhere.
    _turn: Option<File>,
}

fn spec(elements: u64) -> anyhow::Result<JobSpec> {
    Ok(JobSpec { rule: Rule::Sgd, world_size: 4, ..job("bench-wire", vec![param("all", elements)])? })
}

impl BenchRank {
    /// Opens a job on a new server in this process.
    pub(in crate::bench) fn alone(connections: usize, transport: Transport) -> anyhow::Result<BenchRank> {
        let host = Arc::new(Host::start(|_, defaults| Ok(defaults))?);
        let mut options = Options::new(vec![host.address(transport)], spec(BOTH_BYTES / 2)?, Rank(0));
        (options.connections, options.transport) = (connections, transport);
        BenchRank::open(Some(&host), options)
    }

    /// Opens a job on servers elsewhere. `close` deletes it.
    pub(in crate::bench) fn to(
        (servers, access): (Vec<String>, &Access),
        connections: usize,
    ) -> anyhow::Result<BenchRank> {
        // Shards are dealt to the servers, so that each has at least one.
        let elements = (TO_BYTES / 2).max(servers.len() as u64 * DEFAULT_SHARD_ELEMENTS);
        let (name, turn) = turn()?;
        let spec = JobSpec { name: JobName::parse("name", &name)?, ..spec(elements)? };
        let mut options = access.of(Options::new(servers, spec, Rank(0)));
        (options.connections, options.transport) = (connections, Transport::Tcp);
        Ok(BenchRank { _turn: Some(turn), ..BenchRank::open(None, options)? })
    }

    pub(in crate::bench) fn close(self) -> anyhow::Result<()> {
        Ok(self.probe.session().delete_job()?)
    }

    fn open(host: Option<&Arc<Host>>, options: Options) -> anyhow::Result<BenchRank> {
        let elements = options.spec.params[0].elements().unwrap_or(0);
        let mut session = Session::connect(options)?;
        let started = session.start(&|_| vec![0.5; elements as usize]).context("opening the benchmark's job");
        if started.is_err() && host.is_none() {
            // The job may have been opened before the failure.
            let _ = session.delete_job();
        }
        started?;
        Ok(BenchRank { probe: Probe::new(session)?, _host: host.cloned(), _turn: None })
    }

    /// Pushes the whole gradient, and waits until every chunk is acknowledged.
    pub(in crate::bench) fn push(&mut self) -> anyhow::Result<Sample> {
        self.probe.rejoin().context("joining again")?;
        let mut sample = Sample::default();
        sample.time(self.probe.bytes(), || Ok(self.probe.push()?))?;
        self.probe.release();
        Ok(sample)
    }

    /// Pulls version 0 until all of it is in this rank's memory. In shared memory the weights stay on the server, and
    /// this rank reads them once. So the rank has touched all bytes either way.
    pub(in crate::bench) fn pull(&mut self) -> anyhow::Result<Sample> {
        let whole = 0..self.probe.session().layout().elements();
        let mut sample = Sample::default();
        let bytes = whole.end as usize * 2;
        sample.time(bytes, || {
            let feed = self.probe.pull()?;
            if !self.probe.reads_in_place() {
                return Ok(feed.wait(whole)?);
            }
            let mut sum = Crc32::new();
            feed.pieces(whole, |_, bytes| sum.update(bytes))?;
            black_box(sum.value());
            Ok(())
        })?;
        Ok(sample)
    }
}
