//! Frames that cost memory or time, from one connection: the server ends it, and serves the others. The tests of
//! `proto/wire/src/direct` have every limit, and `beside` has floods of other frames.

use longshore_tests::{
    peer::{END_HEADERS, ENHANCE_YOUR_CALM, HEADERS, Peer, RESET, call, frame},
    server::{Longshored, ServerOptions},
    soak,
    train::Train,
};

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
