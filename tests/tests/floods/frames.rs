//! Frames that cost memory or time, from one connection: the server ends it, and serves the others.

use longshore_proto::limits::WINDOW_BYTES;
use longshore_tests::{
    peer::{
        ACK, CONTINUATION, DATA, END_HEADERS, ENHANCE_YOUR_CALM, FLOW_CONTROL_ERROR, FRAME_SIZE_ERROR,
        HEADERS, PING, Peer, RESET, SETTINGS, call, frame, frame_of,
    },
    server::{Longshored, ServerOptions},
    soak,
    train::Train,
};
use longshore_wire::{direct::Mark, frame::encode, v1::PushRequest};

use super::growth;

const PUSH: &str = "/longshore.v1.Tensors/Push";
/// The most memory that one connection's flood takes: its window, the frames around it, and the allocator's
/// overhead.
const ONE_CONNECTION: u64 = 16 << 20;

/// Returns the stream numbers of a client.
fn streams(count: usize) -> impl Iterator<Item = u32> {
    (0..count as u32).map(|index| 2 * index + 1)
}

/// Sends pieces until the server ends the connection. Returns the code of GOAWAY: None where a reset overtook it,
/// because the socket still held unread bytes.
fn flooded(server: &Longshored, pieces: impl Iterator<Item = Vec<u8>>) -> Option<u32> {
    let mut peer = Peer::connect(server.address()).unwrap();
    let reader = Peer { socket: peer.socket.try_clone().unwrap() };
    std::thread::scope(|scope| {
        let reading = scope.spawn(move || reader.end());
        peer.flood(pieces);
        reading.join().unwrap()
    })
}

/// A name, frames, and the codes that may end their connection.
type Excess<'a> = (&'static str, Box<dyn Iterator<Item = Vec<u8>> + 'a>, &'static [u32]);

/// The tests of `proto/wire/src/direct` have every limit.
#[test]
fn each_excess_ends_its_connection_with_its_code() {
    let server = ServerOptions::new().start();
    let headers = |stream| frame(HEADERS, END_HEADERS, stream, &call(PUSH));
    let fields: String =
        (0..200).map(|index| format!("\0\x06name{index:02x}\x0evalue of {index:05}")).collect();
    let first = PushRequest { job: "nobody's".into(), ..PushRequest::default() };
    let marked = Mark::of_request().put(encode(&first)).head;
    let begun = streams(64).flat_map(|stream| [headers(stream), frame(DATA, 0, stream, &marked)]);
    // Two windows on each stream, whatever credit comes back.
    let payload = vec![0; WINDOW_BYTES / 4];
    let more = (0..8).flat_map(|_| streams(64)).map(|stream| frame(DATA, 0, stream, &payload));
    let pings = frame(PING, 0, 0, &[0; 8]).repeat(1000);
    let endless = (0..10_000).map(|_| frame(CONTINUATION, 0, 1, fields.as_bytes()));
    let calm: &[u32] = &[ENHANCE_YOUR_CALM];
    let floods: [Excess<'_>; 4] = [
        ("pings", Box::new((0..10_000).map(|_| pings.clone())), calm),
        ("headers", Box::new([frame(HEADERS, 0, 1, &call(PUSH))].into_iter().chain(endless)), calm),
        ("calls", Box::new(streams(50_000).map(headers)), calm),
        ("a window", Box::new(begun.chain(more)), &[FLOW_CONTROL_ERROR, ENHANCE_YOUR_CALM]),
    ];
    for (what, pieces, codes) in floods {
        let (most, _) = growth(&server, || {
            let code = flooded(&server, pieces);
            assert!(code.is_none_or(|code| codes.contains(&code)), "{what}: {code:?}");
        });
        assert!(most < ONE_CONNECTION, "{what}: {most}");
    }
    for bytes in [frame_of(1024 * 1024 + 1, DATA, 0, 1, &[0; 100]), frame(SETTINGS, ACK, 0, &[0; 6])] {
        let mut peer = Peer::connect(server.address()).unwrap();
        peer.send(&bytes).unwrap();
        assert_eq!(peer.end(), Some(FRAME_SIZE_ERROR), "{:?}", &bytes[..9]);
    }
    assert!(Peer::connect(server.address()).unwrap().lists_jobs());
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
    let (most, after) = growth(&server, || {
        for _ in 0..soak::pick(20, 400) {
            let pair = |stream| {
                let headers = frame(HEADERS, END_HEADERS, stream, &call(PUSH));
                [headers, frame(RESET, 0, stream, &CANCEL)].concat()
            };
            let code = flooded(&server, streams(200_000).map(pair));
            assert!(code.is_none_or(|code| code == ENHANCE_YOUR_CALM), "{code:?}");
        }
    });
    // The training job takes no more memory: admission reserved it, and opening the job touched it.
    assert!(most < ONE_CONNECTION && after < ONE_CONNECTION, "{most}, {after}");
    assert!(Peer::connect(&address).unwrap().lists_jobs());
    assert_eq!(running.finish().end.state_hash, undisturbed, "the resets changed the training");
}
