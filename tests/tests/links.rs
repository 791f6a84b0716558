//! Trainer and servers are on hosts of their own. Links have 25 MB/s and 200 ms there and back, and lose 1 % of all
//! packets. A test cuts one way. The weights are those of an undisturbed run, and waits name the server at the other
//! end.

use std::time::Duration;

use longshore_tests::{
    conformance::cluster::eventually,
    links::Links,
    seed::Random,
    server::{Longshored, ServerOptions},
    skip,
    train::Train,
};

const RATE: f64 = 25e6;
const DELAY: f64 = 0.1;
const LOSS: f64 = 0.01;
const STEPS: u64 = 6;
const DEADLINE: Duration = Duration::from_secs(3);
/// Time beyond the deadline within which a worker ends, since calls without an answer have deadlines of their own.
const GRACE: Duration = Duration::from_secs(12);

/// Makes hosts with bad links. Returns None and reports the test as skipped where this machine has none.
#[track_caller]
fn bad_links(hosts: usize, random: &mut Random) -> Option<Links> {
    match Links::between(hosts, random.below(u64::MAX)) {
        Ok(mut links) => {
            links.set(RATE, DELAY, LOSS);
            Some(links)
        }
        Err(reason) => {
            skip::skipped(&reason);
            None
        }
    }
}

fn on(links: &Links, host: usize, servers: &[&Longshored], train: &Train) -> Train {
    let servers: Vec<String> = servers.iter().map(|server| server.address().to_string()).collect();
    train.clone().under(&links.on(host)).servers(&servers).allow("waiting for a server")
}

/// The server's answers are cut off in the middle of training, until the worker names the silent server.
#[test]
fn training_outlives_a_link_that_is_cut_one_way() {
    let (train, mut random) = (Train::new(STEPS), Random::new());
    let Some(mut links) = bad_links(2, &mut random) else { return };
    let server = links.serve(0, ServerOptions::new());
    let mut running = on(&links, 1, &[&server], &train).start();
    running.until_step(2);
    links.cut(0, 1);
    let named = format!("server {} does not answer", server.address());
    eventually("a wait that names the server", || {
        let said = running.process.stderr();
        (said.contains("still waiting for ") && said.contains(&named)).then_some(())
    });
    links.mend(0, 1);
    assert_eq!(running.finish().end.state_hash, train.undisturbed().hash);
}

/// The worker's messages are cut off for good: the worker ends in time, and its error names the server.
#[test]
fn a_link_that_stays_cut_one_way_is_named_in_time() {
    let deadline = DEADLINE.as_secs().to_string();
    let (train, mut random) = (Train::new(1000).args(["--deadline-s", &deadline]), Random::new());
    let Some(mut links) = bad_links(2, &mut random) else { return };
    let server = links.serve(0, ServerOptions::new());
    let mut running = on(&links, 1, &[&server], &train).start();
    running.until_step(2);
    links.cut(1, 0);
    let (stderr, _) = running.fails(DEADLINE + GRACE);
    let error = stderr.lines().last().unwrap_or_default();
    assert!(error.contains(server.address()) && error.contains("job default"), "{stderr}");
}

/// The link between two servers is cut one way before shards move, and again while they do. The worker reaches both.
#[test]
fn shards_move_once_a_link_between_servers_is_mended() {
    let (train, mut random) = (Train::new(1).endless(), Random::new());
    let Some(mut links) = bad_links(3, &mut random) else { return };
    let source = links.serve(0, ServerOptions::new());
    let next = links.serve(1, ServerOptions::new().allow("cannot be fetched yet"));
    let mut running = on(&links, 2, &[&source], &train).allow("cannot be changed yet").start();
    running.until_step(1);
    links.cut(0, 1);
    let wish = [source.address(), next.address()].join(",");
    let scale = ["scale", "--job", "default", "--servers", source.address(), "--to", &wish];
    let asked = links.longshore(2, &scale);
    assert_eq!(asked.code, 0, "{asked:?}");
    eventually("a wish that waits for the link", || {
        let said = running.process.stderr();
        let is_named = |line: &str| line.contains("cannot be changed yet") && line.contains(source.address());
        said.lines().any(is_named).then_some(())
    });
    // Ranks make steps although the shards cannot move.
    running.until_steps(1);
    links.mend(0, 1);
    eventually("a rank on the new server", || {
        let has_joined = |line: &serde_json::Value| line["fields"]["message"] == "rank joined";
        next.log().iter().any(has_joined).then_some(())
    });
    links.cut(0, 1);
    eventually("a fetch that names its source", || {
        let is_named = |line: &serde_json::Value| line["fields"]["source"] == source.address();
        next.log().iter().any(is_named).then_some(())
    });
    let named = format!("server {} waits for the state of shard ", next.address());
    eventually("a wait that names both servers", || {
        let said = running.process.stderr();
        let line = said.lines().find(|line| line.contains(&named))?;
        line.contains(&format!("from server {}", source.address())).then_some(())
    });
    links.mend(0, 1);
    // Without this, the moves would take as long again.
    links.set(RATE, 0.0, 0.0);
    let done = links.longshore(2, &[&scale[..], &["--wait"]].concat());
    assert_eq!(done.code, 0, "{done:?}");
    let end = running.stop();
    assert_eq!(end.state_hash, train.hash_after(end.version));
}
