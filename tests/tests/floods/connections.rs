//! Silent connections, and too many connections.

use std::{
    fs,
    time::{Duration, Instant},
};

use longshore_tests::{
    conformance::cluster::eventually,
    peer::{NO_ERROR, Peer, SETTINGS, frame},
    process::DEADLINE,
    server::{Longshored, ServerOptions},
    soak,
};
use rustix::process::{Pid, Resource, Rlimit, prlimit};

/// Calls on a new connection. Returns the time until the answer.
fn is_served(server: &Longshored) -> Duration {
    let start = Instant::now();
    eventually("a call to be answered", || Peer::connect(server.address()).ok()?.lists_jobs().then_some(()));
    start.elapsed()
}

fn said(server: &Longshored, text: &str) -> usize {
    server.process.stderr().lines().filter(|line| line.contains(text)).count()
}

#[test]
fn who_does_not_begin_is_hung_up_on() {
    let server = ServerOptions::new().start();
    let start = Instant::now();
    let silent = Peer::silent(server.address()).unwrap();
    let mut half = Peer::silent(server.address()).unwrap();
    half.send(b"PRI * HTTP/2.0\r\n").unwrap();
    let mut preface = Peer::silent(server.address()).unwrap();
    preface.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").unwrap();
    let mut other = Peer::connect(server.address()).unwrap();
    for peer in [silent, half, preface] {
        peer.end();
        let took = start.elapsed();
        assert!((5..20).contains(&took.as_secs()), "{took:?}");
    }
    // A peer that has sent its preface may wait with its first call.
    assert!(other.is_alive() && other.lists_jobs());
}

#[test]
fn silent_connections_make_room_for_those_that_call() {
    let full = "all connections are taken";
    let server = ServerOptions::new().args(["--max-connections", "64"]).allow(full).start();
    let mut worker = Peer::connect(server.address()).unwrap();
    assert!(worker.lists_jobs());
    let mut silent = Vec::new();
    for index in 0..soak::pick(300, 5000) {
        silent.extend(Peer::silent(server.address()));
        // On a slow host the loop takes longer than the server waits for a pong, so the worker must answer pings
        // meanwhile.
        assert!(index % 50 > 0 || worker.is_alive(), "who has called goes after those that have not");
    }
    let took = is_served(&server);
    assert!(took < Duration::from_secs(8), "{took:?}");
    assert!(worker.is_alive(), "who has called goes after those that have not");
    assert_eq!(said(&server, full), 1, "once in 10 s, and it is less since it began");
    drop(silent);
}

#[test]
fn a_connection_that_goes_is_told_that_nothing_is_wrong() {
    let full = "all connections are taken";
    let server = ServerOptions::new().args(["--max-connections", "8"]).allow(full).start();
    let first = Peer::connect(server.address()).unwrap();
    let others: Vec<Peer> = (0..7).map(|_| Peer::connect(server.address()).unwrap()).collect();
    is_served(&server);
    assert_eq!(first.end(), Some(NO_ERROR));
    drop(others);
}

#[test]
fn without_descriptors_it_says_so_and_goes_on() {
    let short = "cannot accept connections";
    let server = ServerOptions::new().allow(short).start();
    let process = server.process.id();
    let open = fs::read_dir(format!("/proc/{process}/fd")).unwrap().count() as u64;
    let limit = Some(open + 12);
    let pid = Pid::from_raw(process as i32).unwrap();
    prlimit(Some(pid), Resource::Nofile, Rlimit { current: limit, maximum: limit }).unwrap();
    let settled: Vec<Peer> = (0..60).filter_map(|_| Peer::connect(server.address()).ok()).collect();
    eventually("it to be short of descriptors", || (said(&server, short) > 0).then_some(()));
    let took = is_served(&server);
    assert!(took < Duration::from_secs(8), "{took:?}");
    assert_eq!(said(&server, short), 1, "once a period");
    drop(settled);
}

#[test]
fn half_open_connections_are_found_dead() {
    if soak::pick(0, 1) == 0 {
        // The test takes two intervals of keepalive, so it runs only in the soak.
        return;
    }
    let server = ServerOptions::new().start();
    let mut peer = Peer::connect(server.address()).unwrap();
    peer.send(&frame(SETTINGS, 1, 0, &[])).unwrap();
    // This peer never answers a ping.
    let start = Instant::now();
    peer.end();
    assert!(start.elapsed() < DEADLINE, "{:?}", start.elapsed());
}
