//! Push and pull as a worker makes them, against a server in this process: from retained chunks into the server's
//! slots, and from a version's image into a feed.

use std::{
    hint::black_box,
    net::{Ipv4Addr, SocketAddr},
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::Duration,
};

use anyhow::Context;
use longshore_proto::{
    ChunkId, Dtype, Incarnation, JobSpec, MicroStep, Rank, Rule, ShardId, Step, Version,
    checksum::{Crc32, crc32},
    limits::BLOCK_ELEMENTS,
    wire::v1::JoinRequest,
};
use longshore_server::{Config, Server};
use tokio::runtime::Runtime;

use super::{Case, meter::Sample};
use crate::{
    bench::{job, param},
    pull::Reading,
    push::{ChunkKey, Outbox, Payload},
    session::{Options, Session, Transport},
};

pub(super) fn cases(connections: usize, bytes: usize) -> anyhow::Result<Vec<Case>> {
    let host = Arc::new(Host::start()?);
    let elements = (bytes as u64 / 2).next_multiple_of(BLOCK_ELEMENTS);
    let mut cases = Vec::new();
    let tcp = host.server.address().to_string();
    for (rank, address, transport, names) in [
        (0, tcp.clone(), Transport::Tcp, ["push tcp", "pull tcp", "raw tcp"]),
        (
            1,
            format!("unix:{}", host.socket.display()),
            Transport::Unix,
            ["push unix", "pull unix", "raw unix"],
        ),
        (2, tcp, Transport::Memfd, ["push memfd", "read memfd", "memcpy"]),
    ] {
        let mut options = Options::new(vec![address], spec(elements)?, Rank(rank));
        (options.connections, options.transport) = (connections, transport);
        let link = Arc::new(Mutex::new(Link::open(&host, options)?));
        let [push, pull, raw] = names;
        let (pushing, pulling) = (Arc::clone(&link), link);
        let lock = |link: &Mutex<Link>| link.lock().unwrap_or_else(PoisonError::into_inner).push();
        cases.push(Case::new(push, Some(raw), move || lock(&pushing)));
        let lock = |link: &Mutex<Link>| link.lock().unwrap_or_else(PoisonError::into_inner).pull();
        cases.push(Case::new(pull, Some(raw), move || lock(&pulling)));
    }
    Ok(cases)
}

/// Each way of one transport, for a bench of something larger.
pub(in crate::bench) struct Both(Link);

/// Enough to leave every cache, little enough to be measured in each round.
const BOTH_BYTES: u64 = 256 << 20;

impl Both {
    pub(in crate::bench) fn open(connections: usize, transport: Transport) -> anyhow::Result<Both> {
        let host = Arc::new(Host::start()?);
        let address = match transport {
            Transport::Unix => format!("unix:{}", host.socket.display()),
            _ => host.server.address().to_string(),
        };
        let mut options = Options::new(vec![address], spec(BOTH_BYTES / 2)?, Rank(0));
        (options.connections, options.transport) = (connections, transport);
        Ok(Both(Link::open(&host, options)?))
    }

    /// GB/s.
    pub(in crate::bench) fn push(&mut self) -> anyhow::Result<f64> {
        Ok(self.0.push()?.gb_per_s())
    }

    /// GB/s. In shared memory the weights are read once.
    pub(in crate::bench) fn pull(&mut self) -> anyhow::Result<f64> {
        Ok(self.0.pull()?.gb_per_s())
    }
}

/// A server on both transports.
struct Host {
    server: Server,
    socket: std::path::PathBuf,
    _folder: tempfile::TempDir,
    _runtime: Runtime,
}

impl Host {
    fn start() -> anyhow::Result<Host> {
        let folder = tempfile::tempdir()?;
        let socket = folder.path().join("bench.sock");
        let defaults = Config::default_on(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
        let config = Config { listen_unix: Some(socket.clone()), ..defaults };
        let runtime = longshore_server::runtime("server")?;
        let server = runtime.block_on(Server::start(config))?;
        Ok(Host { server, socket, _folder: folder, _runtime: runtime })
    }
}

/// One rank's session, and the gradient it pushes again and again. A fourth rank never comes, so that no sum is formed.
struct Link {
    session: Session,
    rank: Rank,
    incarnation: Incarnation,
    chunks: Vec<(ChunkKey, Payload, u32)>,
    _host: Arc<Host>,
}

fn spec(elements: u64) -> anyhow::Result<JobSpec> {
    Ok(JobSpec { rule: Rule::Sgd, world_size: 4, ..job("bench-wire", vec![param("all", elements)])? })
}

impl Link {
    fn open(host: &Arc<Host>, options: Options) -> anyhow::Result<Link> {
        let (rank, elements) = (options.rank, options.spec.params[0].elements().unwrap_or(0));
        let mut session = Session::connect(options)?;
        session.start(&|_| vec![0.5; elements as usize]).context("opening the benchmark's job")?;
        let layout = session.layout();
        let mut chunks = Vec::new();
        for shard in (0..layout.shards()).map(ShardId) {
            for chunk in (0..layout.chunks(shard, Dtype::Bf16)).map(ChunkId) {
                let range = layout.chunk_bytes(shard, chunk, Dtype::Bf16).unwrap_or(0..0);
                let mut buffer = session.core().chunk_pool.take((range.end - range.start) as usize)?;
                buffer.as_mut().fill(chunk.0 as u8);
                let payload = Payload::from(buffer);
                let key = ChunkKey { step: Step(1), micro_step: MicroStep(0), shard, chunk };
                chunks.push((key, payload.clone(), crc32(&payload.bytes)));
            }
        }
        let incarnation = session.core().incarnation();
        Ok(Link { session, rank, incarnation, chunks, _host: Arc::clone(host) })
    }

    fn bytes(&self) -> usize {
        self.chunks.iter().map(|(_, payload, _)| payload.bytes.len()).sum()
    }

    /// The whole gradient, until every chunk is acknowledged.
    fn push(&mut self) -> anyhow::Result<Sample> {
        self.rejoin()?;
        let core = Arc::clone(self.session.core());
        let outbox = Outbox::new(Arc::clone(&core), 1.0, Reading::new(Version(0)), Arc::default());
        let mut sample = Sample::default();
        sample.time(self.bytes(), || {
            for (key, payload, crc32) in &self.chunks {
                outbox.send(*key, payload.clone(), *crc32)?;
            }
            while self.session.unacknowledged_chunks() > 0 {
                core.check()?;
                // Asking ten times as often took 0.03 s of CPU time a GB, which no worker spends.
                thread::sleep(Duration::from_millis(1));
            }
            Ok(())
        })?;
        core.retained.release(Step(1));
        Ok(sample)
    }

    /// As a new process would: the server forgets the rank's chunks, so that the next ones are stored and not compared.
    fn rejoin(&mut self) -> anyhow::Result<()> {
        self.incarnation = Incarnation(self.incarnation.0 + 1);
        let core = self.session.core();
        let (job, incarnation) = (core.job().to_string(), self.incarnation.0);
        let request = JoinRequest { job, rank: self.rank.0, incarnation, fence_only: false };
        let answer = core.block_on(async { Ok(core.peers[0].training().join(request).await) })?;
        answer.context("joining again")?;
        core.set_incarnation(self.incarnation);
        Ok(core.block_on(async { Ok(core.relink(0).await?) })?)
    }

    /// Version 0, until all of it is there: in memory of this rank, or where the server has it, and then read once, so that
    /// the bytes have been in this rank's hands either way.
    fn pull(&mut self) -> anyhow::Result<Sample> {
        let whole = 0..self.session.layout().elements();
        let mut sample = Sample::default();
        let bytes = whole.end as usize * 2;
        sample.time(bytes, || {
            let feed = self.session.pull(Version(0), std::slice::from_ref(&whole), Dtype::Bf16)?;
            if self.session.core().link(0).is_none() {
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
