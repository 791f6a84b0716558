//! Frames that cost memory or time, from one connection and from many.

use std::time::Instant;

use longshore_proto::limits::{
    CALLS_SHARE, IDLE_CALL_BYTES, IDLE_CONNECTION_BYTES, MAX_CALLS, MAX_CONNECTION_CALLS,
    MAX_UNFINISHED_BYTES, SMALL_MESSAGE_BYTES, UNFINISHED_SHARE_BYTES, UNTAKEN_RESULTS_BYTES, WINDOW_BYTES,
};
use longshore_tests::{
    peer::{
        ACK, CONTINUATION, DATA, END_HEADERS, END_STREAM, ENHANCE_YOUR_CALM, FLOW_CONTROL_ERROR,
        FRAME_SIZE_ERROR, HEADERS, PING, Peer, RESET, SETTINGS, call, frame, frame_of,
    },
    server::ServerOptions,
    soak,
    train::Train,
};
use longshore_wire::{
    direct::Mark,
    frame::encode,
    v1::{Dtype, PullRequest, PushRequest, Slice},
};

use super::growth;

const PULL: &str = "/longshore.v1.Tensors/Pull";
const PUSH: &str = "/longshore.v1.Tensors/Push";
const OPEN: &str = "/longshore.v1.Training/Open";

/// Returns the stream numbers of a client.
fn streams(count: usize) -> impl Iterator<Item = u32> {
    (0..count as u32).map(|index| 2 * index + 1)
}

/// Checks that the server ended a flood for its excess. The code is None where a reset overtook it, because
/// the socket still held unread bytes.
fn is_calmed(code: Option<u32>) {
    assert!(matches!(code, None | Some(ENHANCE_YOUR_CALM)), "{code:?}");
}

/// The most memory that one connection's flood takes: its window, the frames around it, and the allocator's
/// overhead.
const ONE_CONNECTION: u64 = 16 << 20;

#[test]
fn marked_streams_share_the_window_of_their_connection() {
    let server = ServerOptions::new().start();
    let (most, _) = growth(&server, || {
        let mut peer = Peer::connect(server.address()).unwrap();
        for stream in streams(64) {
            let first = PushRequest { job: "nobody's".into(), ..PushRequest::default() };
            let message = Mark::of_request().put(encode(&first)).head;
            peer.send(&frame(HEADERS, END_HEADERS, stream, &call(PUSH))).unwrap();
            peer.send(&frame(DATA, 0, stream, &message)).unwrap();
        }
        assert!(peer.is_alive());
        // The peer sends two windows on each stream, whatever credit comes back.
        let payload = vec![0; 512 * 1024];
        let pieces = (0..8).flat_map(|_| streams(64)).map(|stream| frame(DATA, 0, stream, &payload));
        let sent = peer.flood(pieces);
        assert!(sent < 64 * 2 * WINDOW_BYTES, "{sent} bytes were taken");
        // The code may be lost where the socket is closed with unread bytes.
        let code = peer.end();
        assert!(matches!(code, None | Some(FLOW_CONTROL_ERROR | ENHANCE_YOUR_CALM)), "{code:?}");
    });
    assert!(most < ONE_CONNECTION, "{most}");
    assert!(Peer::connect(server.address()).unwrap().lists_jobs());
}

#[test]
fn headers_that_never_end_end_their_connection() {
    let server = ServerOptions::new().start();
    let connections = soak::pick(200, 700);
    let (most, _) = growth(&server, || {
        // Names and values are literals, so that decoding them takes the same memory again.
        let mut fields = Vec::new();
        for index in 0..200 {
            fields.extend_from_slice(format!("\0\x06name{index:02x}\x0evalue of {index:05}").as_bytes());
        }
        let mut peers: Vec<Peer> = Vec::new();
        for _ in 0..connections {
            let mut peer = Peer::connect(server.address()).unwrap();
            peer.send(&frame(HEADERS, 0, 1, &call(PUSH))).unwrap();
            peer.send(&frame(CONTINUATION, 0, 1, &fields)).unwrap();
            peers.push(peer);
        }
        let mut last = peers.pop().unwrap();
        last.flood((0..10_000).map(|_| frame(CONTINUATION, 0, 1, &fields)));
        is_calmed(last.end());
    });
    let each = (IDLE_CONNECTION_BYTES + IDLE_CALL_BYTES + UNFINISHED_SHARE_BYTES) as u64;
    assert!(most < connections as u64 * each + ONE_CONNECTION, "{most}");
    assert!(Peer::connect(server.address()).unwrap().lists_jobs());
}

#[test]
fn streams_without_end_are_refused_and_their_connection_ended() {
    let server = ServerOptions::new().start();
    let (most, after) = growth(&server, || {
        let mut peer = Peer::connect(server.address()).unwrap();
        let reader = Peer { socket: peer.socket.try_clone().unwrap() };
        let code = std::thread::scope(|scope| {
            let reading = scope.spawn(move || reader.end());
            peer.flood(
                streams(soak::pick(50_000, 800_000))
                    .map(|stream| frame(HEADERS, END_HEADERS, stream, &call(PUSH))),
            );
            reading.join().unwrap()
        });
        is_calmed(code);
    });
    assert!(most < ONE_CONNECTION && after < ONE_CONNECTION, "{most}, {after}");
    assert!(Peer::connect(server.address()).unwrap().lists_jobs());
}

#[test]
fn calls_of_many_connections_are_bounded_together() {
    let server = ServerOptions::new().start();
    let connections = soak::pick(100, 1000);
    let (most, _) = growth(&server, || {
        let mut peers = Vec::new();
        for host in 0..connections as u16 {
            let mut peer = Peer::from_host(host, server.address()).unwrap();
            peer.flood(
                streams(MAX_CONNECTION_CALLS as usize)
                    .map(|stream| frame(HEADERS, END_HEADERS, stream, &call(PUSH))),
            );
            peers.push(peer);
        }
        let alive = peers.iter_mut().filter_map(|peer| peer.is_alive().then_some(())).count();
        let calls = alive * MAX_CONNECTION_CALLS as usize;
        eprintln!("{alive} of {connections} connections are left, with {calls} calls");
        assert!(calls <= MAX_CALLS, "{calls} calls");
        // A peer with few calls is served all the same.
        assert!(Peer::connect(server.address()).unwrap().lists_jobs());
    });
    let bound = connections * IDLE_CONNECTION_BYTES
        + (MAX_CALLS + connections * CALLS_SHARE) * (IDLE_CALL_BYTES + SMALL_MESSAGE_BYTES);
    assert!(most < bound as u64 + ONE_CONNECTION, "{most}");
}

#[test]
fn an_address_may_have_few_calls_at_once() {
    let server = ServerOptions::new().start();
    let come = |host: u16, calls: usize| {
        let mut peer = Peer::from_host(host, server.address()).unwrap();
        peer.flood(streams(calls).map(|stream| frame(HEADERS, END_HEADERS, stream, &call(PUSH))));
        peer.is_alive().then_some(peer)
    };
    let many = MAX_CONNECTION_CALLS as usize;
    let start = Instant::now();
    // Each round's connections end before the next round's begin.
    let served: usize = (0..4).map(|_| (0..20).filter_map(|_| come(0, many)).collect::<Vec<_>>().len()).sum();
    // The limit: 512 at once, 512 more in each second, and for each connection its guaranteed few and 8.
    let most = 512.0 * (1.0 + start.elapsed().as_secs_f64());
    let left = served * (many - CALLS_SHARE - 8);
    assert!(served >= 4 && left as f64 <= most, "{left} of {most}");
    assert!(come(0, CALLS_SHARE).is_some(), "a few are always taken");
    assert!(come(1, many).is_some(), "another host's");
}

/// Sends pushes that are refused one by one, on `calls` calls of each connection. The peers read no answer.
fn untaken_answers(connections: usize, calls: usize, messages: usize) {
    let server = ServerOptions::new().start();
    let nonsense = PushRequest { job: "\u{1}".repeat(64), ..PushRequest::default() };
    let messages = encode(&nonsense).head.repeat(messages);
    let (most, _) = growth(&server, || {
        let mut peers = Vec::new();
        for host in 0..connections as u16 {
            let mut peer = Peer::from_host(host, server.address()).unwrap();
            // SETTINGS_INITIAL_WINDOW_SIZE is 0: the server may send the peer no data.
            peer.send(&frame(SETTINGS, 0, 0, &[0, 4, 0, 0, 0, 0])).unwrap();
            // The server may end the connection before all is sent.
            peer.flood(streams(calls).flat_map(|stream| {
                let head = frame(HEADERS, END_HEADERS, stream, &call(PUSH));
                let data = messages.chunks(16_384).map(move |piece| frame(DATA, 0, stream, piece));
                [head].into_iter().chain(data)
            }));
            peers.push(peer);
        }
        let alive = peers.iter_mut().filter_map(|peer| peer.is_alive().then_some(())).count();
        eprintln!("{alive} of {connections} connections are left");
        assert!(Peer::connect(server.address()).unwrap().lists_jobs());
    });
    let each = IDLE_CALL_BYTES + SMALL_MESSAGE_BYTES + UNTAKEN_RESULTS_BYTES;
    let bound = connections * (IDLE_CONNECTION_BYTES + UNFINISHED_SHARE_BYTES)
        + (connections * calls).min(MAX_CALLS + connections * CALLS_SHARE) * each
        + MAX_UNFINISHED_BYTES;
    assert!(most < bound as u64, "{most} of {bound}");
}

#[test]
fn answers_that_nobody_takes_are_bounded_for_many_calls() {
    untaken_answers(soak::pick(32, 200), MAX_CONNECTION_CALLS as usize, 100);
}

#[test]
fn answers_that_nobody_takes_are_bounded_for_many_connections() {
    untaken_answers(soak::pick(200, 1000), 1, WINDOW_BYTES / 100);
}

/// Stock clients get copies of weights: these clients ask for them and read none.
#[test]
fn weights_that_nobody_takes_share_a_room() {
    let server = ServerOptions::new().start();
    let address = server.address().to_string();
    let train = Train::new(2).servers(std::slice::from_ref(&address));
    train.run();
    let slice = Slice { shard: 0, offset: 0, elements: 65_536 };
    let request = PullRequest {
        job: "default".into(),
        version: 2,
        dtype: Dtype::Bf16.into(),
        slices: vec![slice; 16],
        ..PullRequest::default()
    };
    let request = encode(&request).head;
    let connections = soak::pick(16, 32);
    let (most, _) = growth(&server, || {
        let mut peers = Vec::new();
        for host in 0..connections as u16 {
            let mut peer = Peer::from_host(host, server.address()).unwrap();
            peer.send(&frame(SETTINGS, 0, 0, &[0, 4, 0, 0, 0, 0])).unwrap();
            for stream in streams(100) {
                peer.send(&frame(HEADERS, END_HEADERS, stream, &call(PULL))).unwrap();
                peer.send(&frame(DATA, END_STREAM, stream, &request)).unwrap();
            }
            peers.push(peer);
        }
        assert!(peers.iter_mut().all(Peer::is_alive));
        assert!(Peer::connect(server.address()).unwrap().lists_jobs());
    });
    let calls = connections * 100 * (IDLE_CALL_BYTES + SMALL_MESSAGE_BYTES);
    let bound = connections * (IDLE_CONNECTION_BYTES + UNFINISHED_SHARE_BYTES) + calls + MAX_UNFINISHED_BYTES;
    assert!(most < bound as u64 + ONE_CONNECTION, "{most} of {bound}");
    // Ranks are not strangers.
    train.run();
}

#[test]
fn messages_and_frames_that_never_end_share_their_room() {
    let server = ServerOptions::new().start();
    let connections = soak::pick(300, 700);
    let half = vec![0; 512 * 1024];
    let (most, _) = growth(&server, || {
        let mut peers = Vec::new();
        for index in 0..connections {
            let mut peer = Peer::connect(server.address()).unwrap();
            peer.send(&frame(HEADERS, END_HEADERS, 1, &call(if index % 2 == 0 { OPEN } else { PUSH })))
                .unwrap();
            // Part of a message of 16 MB, and half of a frame.
            peer.flood(
                [frame(DATA, 0, 1, &[0, 0, 0xF0, 0, 0]), frame_of(2 * half.len(), DATA, 0, 1, &half)]
                    .into_iter(),
            );
            peers.push(peer);
        }
        assert!(Peer::connect(server.address()).unwrap().lists_jobs());
    });
    let each = IDLE_CONNECTION_BYTES + IDLE_CALL_BYTES + UNFINISHED_SHARE_BYTES + SMALL_MESSAGE_BYTES;
    // The bound covers the bytes in the server and in h2, and the pieces read last.
    let bound = connections * each + 2 * MAX_UNFINISHED_BYTES;
    assert!(most < bound as u64, "{most} of {bound}");
}

#[test]
fn frames_of_a_wrong_size_are_called_so() {
    let server = ServerOptions::new().start();
    let wrong = [
        frame_of(1024 * 1024 + 1, DATA, 0, 1, &[0; 100]),
        frame_of(1024 * 1024 + 1, HEADERS, END_HEADERS, 1, &[0; 100]),
        frame(SETTINGS, 0, 0, &[0; 5]),
        frame(SETTINGS, ACK, 0, &[0; 6]),
        frame(PING, 0, 0, &[0; 7]),
        frame(8, 0, 0, &[0; 3]),
        frame(2, 0, 1, &[0; 4]),
        frame(3, 0, 1, &[0; 5]),
    ];
    for bytes in wrong {
        let mut peer = Peer::connect(server.address()).unwrap();
        peer.send(&bytes).unwrap();
        assert_eq!(peer.end(), Some(FRAME_SIZE_ERROR), "{:?}", &bytes[..9]);
    }
}

#[test]
fn pings_without_end_end_their_connection() {
    let server = ServerOptions::new().start();
    let mut peer = Peer::connect(server.address()).unwrap();
    let reader = Peer { socket: peer.socket.try_clone().unwrap() };
    let pings = frame(PING, 0, 0, &[0; 8]).repeat(1000);
    let code = std::thread::scope(|scope| {
        let reading = scope.spawn(move || reader.end());
        peer.flood((0..10_000).map(|_| pings.clone()));
        reading.join().unwrap()
    });
    is_calmed(code);
}

/// The code of CANCEL, which cancels a call.
const CANCEL: [u8; 4] = [0, 0, 0, 8];

/// Rapid reset (CVE-2023-44487): each call is cancelled as soon as it begins, so few are open at once.
#[test]
fn calls_that_are_taken_back_at_once_end_their_connection() {
    let server = ServerOptions::new().start();
    let address = server.address().to_string();
    let train = Train::new(60);
    let undisturbed = train.undisturbed().hash;
    let mut running = train.args(["--transport", "tcp"]).servers(std::slice::from_ref(&address)).start();
    running.until_step(2);
    let connections = soak::pick(20, 400);
    let (most, after) = growth(&server, || {
        for _ in 0..connections {
            let mut peer = Peer::connect(&address).unwrap();
            let reader = Peer { socket: peer.socket.try_clone().unwrap() };
            let pairs = |stream| {
                let headers = frame(HEADERS, END_HEADERS, stream, &call(PUSH));
                [headers, frame(RESET, 0, stream, &CANCEL)].concat()
            };
            let code = std::thread::scope(|scope| {
                let reading = scope.spawn(move || reader.end());
                let sent = peer.flood(streams(200_000).map(pairs));
                assert!(sent < 200_000 * pairs(1).len(), "all calls were taken");
                reading.join().unwrap()
            });
            is_calmed(code);
        }
    });
    // The training job takes no more memory: admission reserved it, and opening the job touched it.
    assert!(most < ONE_CONNECTION && after < ONE_CONNECTION, "{most}, {after}");
    assert!(Peer::connect(&address).unwrap().lists_jobs());
    assert_eq!(running.finish().end.state_hash, undisturbed, "the resets changed the training");
}
