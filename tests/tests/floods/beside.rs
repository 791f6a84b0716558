//! A training job goes on beside every flood at once.

use std::{
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use longshore_proto::limits::STRANGERS_BYTES;
use longshore_tests::{
    peer::{CONTINUATION, DATA, END_HEADERS, HEADERS, PING, Peer, call, frame},
    process::{forget_peak, memory_of},
    server::ServerOptions,
    soak,
    train::Train,
};

const PUSH: &str = "/longshore.v1.Tensors/Push";

/// Floods the server one flood after another until told to stop, each on a connection of its own. Between floods it
/// rests, since the test measures what floods do to the server and not what making them costs the processor.
fn flood(address: &str, over: &AtomicBool, floods: &AtomicUsize) {
    for turn in 0.. {
        if over.load(Ordering::Relaxed) {
            return;
        }
        let Ok(mut peer) = Peer::connect(address) else { continue };
        match turn % 5 {
            0 => peer.flood((0..2000).map(|at| frame(HEADERS, END_HEADERS, 2 * at + 1, &call(PUSH)))),
            1 => peer.flood((0..200).map(|_| frame(PING, 0, 0, &[0; 8]).repeat(100))),
            2 => {
                let first = frame(HEADERS, 0, 1, &call(PUSH));
                peer.flood([first].into_iter().chain((0..100).map(|_| frame(CONTINUATION, 0, 1, &[0; 1000]))))
            }
            3 => {
                let first = frame(HEADERS, END_HEADERS, 1, &call(PUSH));
                peer.flood([first].into_iter().chain((0..100).map(|_| frame(DATA, 0, 1, &[0; 65_536]))))
            }
            _ => (0..20).filter_map(|_| Peer::silent(address).ok()).count(),
        };
        floods.fetch_add(1, Ordering::Relaxed);
        thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn training_goes_on_beside_floods() {
    let server = ServerOptions::new().allow("all connections are taken").start();
    let address = server.address().to_string();
    let steps = soak::pick(60, 600) as u64;
    let arguments = ["--transport", "tcp", "--deadline-s", "30"];
    let train = Train::new(2 * steps).args(arguments).servers(std::slice::from_ref(&address));
    let mut running = train.start();
    let (mut longest, mut longest_alone) = (Duration::ZERO, Duration::ZERO);
    let measure = |running: &mut longshore_tests::train::Running, longest: &mut Duration| {
        let (start, mut last) = (Instant::now(), Instant::now());
        for _ in 0..steps - 5 {
            running.until_steps(1);
            *longest = (*longest).max(last.elapsed());
            last = Instant::now();
        }
        start.elapsed()
    };
    running.until_steps(5);
    let alone = measure(&mut running, &mut longest_alone);
    let (over, floods) = (AtomicBool::new(false), AtomicUsize::new(0));
    forget_peak(server.process.id());
    let (before, _) = memory_of(server.process.id());
    let beside = thread::scope(|scope| {
        scope.spawn(|| flood(&address, &over, &floods));
        let beside = measure(&mut running, &mut longest);
        over.store(true, Ordering::Relaxed);
        beside
    });
    let (_, most) = memory_of(server.process.id());
    let floods = floods.into_inner();
    let slower = beside.as_secs_f64() / alone.as_secs_f64();
    eprintln!(
        "alone {alone:?}, beside {floods} floods {beside:?}: {slower:.2}, longest step {longest:?} ({longest_alone:?})"
    );
    let end = running.finish().end;
    assert_eq!(end.state_hash, Train::new(2 * steps).run().end.state_hash, "the floods changed the training");
    // The margin is for a busy machine; on a quiet one it is to be under 1 s.
    assert!(longest < Duration::from_secs(3), "a step took {longest:?}");
    assert!(most - before < STRANGERS_BYTES as u64, "{most} after {before}");
}
