//! Each row of docs/limits.md is a kind of peer. The worst that such a peer can do stays within the row's figures.

use std::{
    fs,
    os::unix::net::UnixStream,
    path::Path,
    time::{Duration, Instant},
};

use longshore_proto::{
    JobName,
    limits::{
        IDLE_CALL_BYTES, LOCAL_CONNECTIONS, MAX_CONTROL_MESSAGE_BYTES, MAX_UNFINISHED_BYTES,
        RANK_SHARE_BYTES, SMALL_MESSAGE_BYTES,
    },
};
use longshore_tests::{
    command::done,
    conformance::raw::{Raw, placement},
    peer::{DATA, END_HEADERS, END_STREAM, HEADERS, Peer, SETTINGS, call, frame, frame_of},
    process::{forget_peak, memory_of, threads_of},
    server::{Longshored, ServerOptions},
    status::status,
    train::Train,
};
use longshore_wire::{
    Wire, dtype_to_wire, fault_from_status,
    frame::encode,
    v1::{
        DescribeRequest, Dtype, ExportRequest, JobSpec, JoinRequest, OpenJobRequest, Param, PullRequest,
        PushRequest, Slice, training_client::TrainingClient,
    },
};
use longshore_worker::{Options, Session};
use tempfile::TempDir;
use tokio::runtime::Runtime;
use tonic::transport::Endpoint;

use super::growth;

const DESCRIBE: &str = "/longshore.v1.Admin/DescribeInParts";
const JOIN: &str = "/longshore.v1.Training/Join";
const OPEN: &str = "/longshore.v1.Training/OpenJob";
const PULL: &str = "/longshore.v1.Tensors/Pull";
const PUSH: &str = "/longshore.v1.Tensors/Push";
/// Bytes that the allocator and HTTP/2 add to the counted ones.
const MARGIN: u64 = 24 << 20;
/// Columns of the table in docs/limits.md.
const MEMORY: usize = 1;
const CONNECTIONS: usize = 2;
const THREADS: usize = 3;
const DISK: usize = 4;
const WAITS: usize = 5;
/// Time for two steps of the innocent job on a busy machine, with the start of its process.
const OWN_TIME: Duration = Duration::from_secs(5);
const MOST_CONNECTIONS: usize = 1024;

/// Returns the numbers in a cell of the table. A cell that says "as a reader" begins with the numbers of that row's
/// cell.
fn figures(row: &str, column: usize) -> Vec<u64> {
    let page = include_str!("../../../docs/limits.md");
    let is_row = |line: &&str| line.starts_with(&format!("| {row}"));
    let line = page.lines().find(is_row).unwrap_or_else(|| panic!("no row of {row}"));
    let cell = line.split('|').nth(column + 1).expect("six columns");
    let other = cell.split("as a ").nth(1).and_then(|rest| rest.split([' ', ';']).next());
    let numbers = cell.split(|letter: char| !letter.is_ascii_digit()).filter_map(|word| word.parse().ok());
    other.map(|other| figures(other, column)).unwrap_or_default().into_iter().chain(numbers).collect()
}

fn mib(row: &str) -> u64 {
    figures(row, MEMORY)[0] << 20
}

/// Returns how many of the server's connections one address may have.
fn share(row: &str) -> usize {
    MOST_CONNECTIONS - figures(row, CONNECTIONS)[0] as usize
}

/// A server with every kind of folder, and an innocent job that trains beside the worst peer.
struct Bed {
    server: Longshored,
    folders: [TempDir; 3],
    socket: String,
}

/// The server's growth during the worst peer, and the time of two steps of the innocent job meanwhile.
#[derive(Debug)]
struct Held {
    memory: u64,
    threads: u64,
    disk: u64,
    waited: Duration,
}

impl Bed {
    fn new(most_connections: usize) -> Bed {
        let folders = [TempDir::new(), TempDir::new(), TempDir::new_in("/dev/shm")].map(Result::unwrap);
        let [state, checkpoints, shm] = folders.each_ref().map(|folder| folder.path().display().to_string());
        let socket = folders[0].path().join("socket").display().to_string();
        fs::create_dir(folders[0].path().join("state")).unwrap();
        let state = format!("{state}/state");
        let options = ServerOptions::new().allow("all connections are taken");
        let options = options.args(["--state-dir", &state, "--checkpoint-dir", &checkpoints]);
        let options = options.args(["--shm-dir", &shm, "--listen-unix", &socket]);
        let server = options.args(["--max-connections", &most_connections.to_string()]).start();
        let bed = Bed { server, folders, socket };
        bed.train("innocent", 2, &[]);
        bed
    }

    fn train(&self, job: &str, steps: u64, more: &[&str]) {
        Train::new(steps).args(["--job", job]).args(more).servers(&[format!("unix:{}", self.socket)]).run();
    }

    /// Calls `worst`, whose result holds all its connections and calls open. Meanwhile the innocent job trains.
    fn held<T>(&self, worst: impl FnOnce() -> T) -> (T, Held) {
        let process = self.server.process.id();
        let disk = || self.folders.iter().map(|folder| bytes_in(folder.path())).sum::<u64>();
        forget_peak(process);
        let (memory, threads, before) = (memory_of(process).0, threads_of(process), disk());
        let kept = worst();
        let begun = Instant::now();
        self.train("innocent", 4, &[]);
        let waited = begun.elapsed();
        let held = Held {
            memory: memory_of(process).1.saturating_sub(memory),
            threads: threads_of(process).saturating_sub(threads),
            disk: disk().saturating_sub(before),
            waited,
        };
        eprintln!("{held:?}");
        (kept, held)
    }
}

/// Checks all columns except connections. A row has the threads of one job, so `jobs` multiplies them.
#[track_caller]
fn check(row: &str, held: &Held, memory: u64, (jobs, disk): (u64, u64)) {
    let threads = jobs * figures(row, THREADS).iter().sum::<u64>();
    let disk = disk + figures(row, DISK).iter().sum::<u64>();
    let waits = Duration::from_secs(figures(row, WAITS).last().copied().unwrap_or(0));
    assert!(held.memory <= memory, "{row}: {held:?}, but the page says {memory} bytes");
    assert!(held.threads <= threads, "{row}: {held:?}, but the page says {threads} threads");
    assert!(held.disk <= disk, "{row}: {held:?}, but the page says {disk} bytes of disk");
    assert!(held.waited <= waits + OWN_TIME, "{row}: {held:?}, but the page says {waits:?}");
}

/// Returns the bytes that a folder's files occupy.
fn bytes_in(folder: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let of = |path: &Path| if path.is_dir() { bytes_in(path) } else { 0 };
    let entries = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    entries.map(|path| fs::symlink_metadata(&path).map_or(0, |file| file.blocks() * 512) + of(&path)).sum()
}

fn ask(peer: &mut Peer, stream: u32, path: &str, message: &[u8]) {
    let headers = frame(HEADERS, END_HEADERS, stream, &call(path));
    peer.send(&[headers, frame(DATA, END_STREAM, stream, message)].concat()).unwrap();
}

/// Opens connections from one address until the server gives no more. Each has a call that stays open.
fn come(bed: &Bed, host: u16, path: &str) -> Vec<Peer> {
    let come = |_| {
        let mut peer = Peer::from_host(host, bed.server.address()).ok()?;
        peer.send(&frame(HEADERS, END_HEADERS, 1, &call(path))).ok()?;
        peer.is_alive().then_some(peer)
    };
    let mut came: Vec<Peer> = (0..MOST_CONNECTIONS).filter_map(come).collect();
    came.retain_mut(Peer::is_alive);
    came
}

/// The stranger takes all connections of an address, with half a frame on each. From other addresses come calls whose
/// results nobody reads.
#[test]
fn a_stranger_is_held_within_its_row() {
    let bed = Bed::new(MOST_CONNECTIONS);
    let nonsense = PushRequest { job: "\u{1}".repeat(64), ..PushRequest::default() };
    let pushes = encode(&nonsense).head.repeat(100);
    let ((first, _others), held) = bed.held(|| {
        let mut first = come(&bed, 1, PUSH);
        for peer in &mut first {
            peer.flood([frame_of(1 << 20, DATA, 0, 1, &[0; 64 << 10])].into_iter());
        }
        let others: Vec<Peer> = (2..34)
            .map(|host| {
                let mut peer = Peer::from_host(host, bed.server.address()).unwrap();
                peer.send(&frame(SETTINGS, 0, 0, &[0, 4, 0, 0, 0, 0])).unwrap();
                peer.flood((0..128).flat_map(|index| {
                    let head = frame(HEADERS, END_HEADERS, 2 * index + 1, &call(PUSH));
                    [head, frame(DATA, 0, 2 * index + 1, &pushes)]
                }));
                peer
            })
            .collect();
        assert!(Peer::from_host(99, bed.server.address()).unwrap().lists_jobs());
        (first, others)
    });
    assert!((300..=share("stranger")).contains(&first.len()), "{} of one address", first.len());
    check("stranger", &held, mib("stranger"), (1, 0));
}

/// The reader asks for weights, exports and hashes, and reads no answer.
#[test]
fn a_reader_is_held_within_its_row() {
    let bed = Bed::new(MOST_CONNECTIONS);
    let address = bed.server.address().to_string();
    // The job has 48 MiB in fp32: more than sockets take.
    let params = (0..12).map(|index| longshore_proto::Param {
        name: format!("p{index}"),
        shape: vec![1 << 20],
        group: 0,
    });
    let name = JobName::parse("job", "large").unwrap();
    let spec = longshore_proto::JobSpec::new(name, params.collect());
    let mut session =
        Session::connect(Options::new(vec![address.clone()], spec, longshore_proto::Rank(0))).unwrap();
    session.start(&|_| vec![0.5; 1 << 20]).unwrap();
    let slice = Slice { shard: 0, offset: 0, elements: 65_536 };
    let pull = PullRequest {
        job: "large".into(),
        version: 0,
        dtype: Dtype::Bf16.into(),
        slices: vec![slice; 16],
        ..PullRequest::default()
    };
    let pull = encode(&pull).head;
    let runtime = Runtime::new().unwrap();
    // Untaken exports fill the window of their connection.
    let [raw, stuck] = [(); 2].map(|()| Raw::connect(runtime.handle().clone(), address.parse().unwrap()));
    let ((came, ..), held) = bed.held(|| {
        let mut came = come(&bed, 1, PULL);
        for peer in &mut came[..100] {
            peer.send(&frame(SETTINGS, 0, 0, &[0, 4, 0, 0, 0, 0])).unwrap();
            peer.send(&frame(DATA, END_STREAM, 1, &pull)).unwrap();
        }
        let dtype = dtype_to_wire(longshore_proto::Dtype::F32);
        let export = ExportRequest { job: "large".into(), dtype, deadline_ms: 60_000, ..Default::default() };
        let exports: Vec<_> =
            (0..4).map(|_| stuck.call(stuck.admin.clone().export(export.clone())).unwrap()).collect();
        let hash = DescribeRequest { job: "large".into(), state_hash: true, ..Default::default() };
        runtime.block_on(async {
            let asks = (0..8).map(|_| {
                let (mut admin, hash) = (raw.admin.clone(), hash.clone());
                tokio::spawn(async move { admin.describe(hash).await })
            });
            for asked in asks.collect::<Vec<_>>() {
                asked.await.unwrap().unwrap();
            }
        });
        (came, exports)
    });
    assert!((300..=share("reader")).contains(&came.len()), "{} of one address", came.len());
    check("reader", &held, mib("reader"), (1, 0));
}

/// The worker opens a job of each tier with checkpoints, and sends messages without an end on a rank's connections.
#[test]
fn a_worker_is_held_within_its_row() {
    let bed = Bed::new(MOST_CONNECTIONS);
    let server = &bed.server;
    let tiers = ["memory", "nvme", "shm"];
    let (came, held) = bed.held(|| {
        for tier in tiers {
            bed.train(tier, 2, &["--tier", tier, "--checkpoint-every", "1"]);
        }
        let mut came = Vec::new();
        for incarnation in 1..=8 {
            let mut peer = Peer::from_host(1, server.address()).unwrap();
            let incarnation = u64::MAX / 2 + incarnation;
            let join = JoinRequest { job: "memory".into(), incarnation, ..Default::default() };
            ask(&mut peer, 1, JOIN, &encode(&join).head);
            assert!(peer.is_alive());
            came.push(peer);
        }
        came.extend(come(&bed, 1, PUSH));
        came
    });
    let ranks = 1;
    let own = *figures("worker", CONNECTIONS).last().unwrap() as usize;
    assert!(came.len() <= ranks * own + share("worker"), "{} connections", came.len());
    let jobs = status(&[server.address().to_string()]);
    let of = |what: fn(&longshore_tests::status::ServerStatus) -> u64| {
        jobs.iter().map(|job| what(&job.servers[0])).sum::<u64>()
    };
    // Files of the tier shm lie in memory, and admission counts them there.
    let shm = jobs.iter().find(|job| job.job == "shm").unwrap().servers[0].memory_bytes;
    let checkpoints = bytes_in(bed.folders[1].path());
    assert!(checkpoints > 0);
    let (memory, disk) = (of(|server| server.memory_bytes), of(|server| server.disk_bytes));
    check("worker", &held, memory + mib("worker"), (tiers.len() as u64, disk + shm + checkpoints));
}

/// The operator comes by the Unix socket and acts on a job, while one address has all connections it may have.
#[test]
fn an_operator_is_held_within_its_row() {
    const FEW: usize = 16;
    let bed = Bed::new(FEW);
    assert_eq!(figures("operator", CONNECTIONS), [LOCAL_CONNECTIONS as u64]);
    let ((first, others, mut local), held) = bed.held(|| {
        let (first, others) = (come(&bed, 1, PUSH), come(&bed, 2, PUSH));
        let local: Vec<Peer<UnixStream>> =
            (0..4 * FEW).map(|_| Peer::over(UnixStream::connect(&bed.socket).unwrap()).unwrap()).collect();
        for act in [&["status"][..], &["checkpoint", "--name", "by-hand"], &["checkpoints"]] {
            let servers = format!("unix:{}", bed.socket);
            done([act, &["--job", "innocent", "--servers", &servers]].concat());
        }
        (first, others, local)
    });
    assert!((FEW / 2..FEW).contains(&first.len()), "{} of one address", first.len());
    assert!(!others.is_empty(), "one address has all places");
    assert!(local.iter_mut().all(Peer::is_alive), "an operator's connection was ended");
    let checkpoints = bytes_in(bed.folders[1].path());
    check("operator", &held, mib("operator"), (1, checkpoints));
}

/// A rank's connection sends the longest messages without their last byte.
#[test]
fn messages_of_a_rank_that_never_end_are_counted() {
    let server = ServerOptions::new().start();
    let train = || Train::new(2).servers(&[server.address().to_string()]).run();
    train();
    let (most, _) = growth(&server, || {
        let mut peer = Peer::connect(server.address()).unwrap();
        let join = JoinRequest { job: "default".into(), incarnation: u64::MAX / 2, ..Default::default() };
        ask(&mut peer, 1, JOIN, &encode(&join).head);
        assert!(peer.is_alive());
        let [_, a, b, c] = (MAX_CONTROL_MESSAGE_BYTES as u32 - 1).to_be_bytes();
        let begin = [&[0, 0, a, b, c][..], &[0; 16_000]].concat();
        for stream in (0..100).map(|call| 2 * call + 3) {
            peer.send(&frame(HEADERS, END_HEADERS, stream, &call(OPEN))).unwrap();
            peer.flood([frame(DATA, 0, stream, &begin)].into_iter());
            assert!(peer.is_alive());
        }
        // Each round stays within the window, which the server gives back as it takes the bytes.
        for round in 0..700 {
            let calls = 10 * (round % 10)..10 * (round % 10) + 10;
            peer.flood(calls.map(|call| frame(DATA, 0, 2 * call + 3, &[0; 16_000])));
            if !peer.is_alive() {
                break;
            }
        }
    });
    let bound = (RANK_SHARE_BYTES + MAX_UNFINISHED_BYTES) as u64 + MARGIN;
    assert!(most < bound, "{most} of {bound}");
    train();
}

/// Elements without contents take 2 bytes on the wire.
#[test]
fn empty_elements_are_refused_before_they_are_decoded() {
    let server = ServerOptions::new().start();
    let address = format!("http://{}", server.address());
    let (most, _) = growth(&server, || {
        Runtime::new().unwrap().block_on(async {
            let channel = Endpoint::from_shared(address).unwrap().connect().await.unwrap();
            let spec =
                JobSpec { name: "a".into(), params: vec![Param::default(); 2 << 20], ..Default::default() };
            let open = OpenJobRequest { spec: Some(spec), ..Default::default() };
            let status = TrainingClient::new(channel).open_job(open).await.expect_err("more than fits");
            assert_eq!(fault_from_status(&status, "").field, "request", "{status}");
        });
        let mut peer = Peer::connect(server.address()).unwrap();
        // The message fills the first window of a stream.
        let pull = PullRequest { slices: vec![Slice::default(); 30_000], ..Default::default() };
        ask(&mut peer, 1, PULL, &encode(&pull).head);
        assert!(peer.is_alive());
    });
    // The server holds the message as received, and none of its elements.
    assert!(most < (4 << 20) + MARGIN, "{most}");
}

/// Readers with a small window ask for a large description, and take nothing.
#[test]
fn descriptions_that_nobody_takes_share_a_room() {
    let server = ServerOptions::new().start();
    let address = server.address().to_string();
    let param =
        |index: u32| longshore_proto::Param { name: format!("{index:0>200}"), shape: vec![1], group: 0 };
    let name = JobName::parse("job", "large").unwrap();
    let spec = longshore_proto::JobSpec::new(name, (0..20_000).map(param).collect());
    let placed = placement(std::slice::from_ref(&address), &spec.validate().unwrap());
    let runtime = Runtime::new().unwrap();
    let raw = Raw::connect(runtime.handle().clone(), address.parse().unwrap());
    raw.open(spec.to_wire(), &placed, 0).unwrap();
    let describe = encode(&DescribeRequest { job: "large".into(), ..Default::default() }).head;
    let connections = 8;
    let (most, _) = growth(&server, || {
        let mut peers = Vec::new();
        for host in 0..connections {
            let mut peer = Peer::from_host(host, &address).unwrap();
            peer.send(&frame(SETTINGS, 0, 0, &[0, 4, 0, 0, 3, 232])).unwrap();
            (0..50).for_each(|call| ask(&mut peer, 2 * call + 1, DESCRIBE, &describe));
            peers.push(peer);
        }
        assert!(peers.iter_mut().all(Peer::is_alive));
        assert!(Peer::connect(&address).unwrap().lists_jobs());
    });
    let calls = usize::from(connections) * 50 * (IDLE_CALL_BYTES + SMALL_MESSAGE_BYTES);
    let bound = (calls + MAX_UNFINISHED_BYTES) as u64 + MARGIN;
    assert!(most < bound, "{most} of {bound}");
}
