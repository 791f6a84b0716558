//! The worst of each row of docs/limits.md: messages and answers by a peer whose connection is a rank's, or a reader's.

use longshore_proto::{
    JobName,
    limits::{
        IDLE_CALL_BYTES, MAX_CONTROL_MESSAGE_BYTES, MAX_UNFINISHED_BYTES, RANK_SHARE_BYTES,
        SMALL_MESSAGE_BYTES,
    },
};
use longshore_tests::{
    command::longshore,
    conformance::{cluster::eventually, raw::placement},
    peer::{DATA, END_HEADERS, END_STREAM, HEADERS, Peer, SETTINGS, call, frame},
    server::{Longshored, ServerOptions},
    train::Train,
};
use longshore_wire::{
    Wire, fault_from_status,
    frame::encode,
    v1::{
        DescribeRequest, Dtype, JobSpec, JoinRequest, OpenJobRequest, Param, PullRequest, Slice,
        training_client::TrainingClient,
    },
};
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

fn train(server: &Longshored) {
    Train::new(2).servers(&[server.address().to_string()]).run();
}

fn ask(peer: &mut Peer, stream: u32, path: &str, message: &[u8]) {
    let headers = frame(HEADERS, END_HEADERS, stream, &call(path));
    peer.send(&[headers, frame(DATA, END_STREAM, stream, message)].concat()).unwrap();
}

/// A rank's connection sends the most of each message and never its end.
#[test]
fn messages_of_a_rank_that_never_end_are_counted() {
    let server = ServerOptions::new().start();
    train(&server);
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
    train(&server);
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
        let pull = PullRequest { slices: vec![Slice::default(); 100_000], ..Default::default() };
        ask(&mut peer, 1, PULL, &encode(&pull).head);
        assert!(peer.is_alive());
    });
    // The message itself, as received.
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
    let layout = spec.validate().unwrap();
    let placed = placement(std::slice::from_ref(&address), &layout);
    Runtime::new().unwrap().block_on(async {
        let channel = Endpoint::from_shared(format!("http://{address}")).unwrap().connect().await.unwrap();
        let (spec, placement) = (Some(spec.to_wire()), Some(placed.to_wire()));
        let open = OpenJobRequest { spec, placement, ..Default::default() };
        TrainingClient::new(channel).open_job(open).await.unwrap();
    });
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

/// HTTP/2 asks for a body's first bytes before the reader's window opens, so a message of each call waits in the ledger.
#[test]
fn weights_for_closed_windows_wait_within_the_room_of_all() {
    let server = ServerOptions::new().start();
    train(&server);
    let slice = Slice { shard: 0, offset: 0, elements: 65_536 };
    let pull = PullRequest {
        job: "default".into(),
        version: 2,
        dtype: Dtype::Bf16.into(),
        slices: vec![slice; 16],
        ..PullRequest::default()
    };
    let pull = encode(&pull).head;
    let (connections, calls) = (10, 110);
    let (most, _) = growth(&server, || {
        let mut peers = Vec::new();
        for host in 0..connections {
            let mut peer = Peer::from_host(host, server.address()).unwrap();
            peer.send(&frame(SETTINGS, 0, 0, &[0, 4, 0, 0, 0, 0])).unwrap();
            (0..calls).for_each(|call| ask(&mut peer, 2 * call + 1, PULL, &pull));
            peers.push(peer);
        }
        assert!(peers.iter_mut().all(Peer::is_alive));
    });
    // Less than the first messages of all calls, which take 128 KiB each.
    let calls = usize::from(connections) * calls as usize;
    let bound = (calls * (IDLE_CALL_BYTES + SMALL_MESSAGE_BYTES) + MAX_UNFINISHED_BYTES) as u64 + MARGIN;
    assert!(most < bound, "{most} of {bound}");
}

/// Hosts with a call on each connection leave places to others. The server's own user gets in whatever they hold.
#[test]
fn one_host_leaves_connections_to_others_and_operators_always_get_in() {
    let folder = TempDir::new().unwrap();
    let socket = folder.path().join("s").display().to_string();
    let full = "all connections are taken";
    let flags = ["--max-connections", "16", "--listen-unix", &socket];
    let server = ServerOptions::new().args(flags).allow(full).start();
    let come = |host: u16| {
        let mut peer = Peer::from_host(host, server.address()).ok()?;
        peer.send(&frame(HEADERS, END_HEADERS, 1, &call(PUSH))).ok()?;
        peer.is_alive().then_some(peer)
    };
    let first: Vec<Peer> = (0..16).filter_map(|_| come(1)).collect();
    assert!((8..16).contains(&first.len()), "{} of one host", first.len());
    let others: Vec<Peer> = (0..16).filter_map(|_| come(2)).collect();
    assert!(!others.is_empty(), "one host has all places");
    let mut status = None;
    eventually("all places to be taken", || {
        status = Some(longshore(["status", "--servers", &format!("unix:{socket}")]));
        server.process.stderr().contains(full).then_some(())
    });
    let status = status.unwrap();
    assert_eq!(status.code, 0, "{}", status.stderr);
}
