//! Shards have two holders. A server that is lost for good takes no step with it: the weights are those of an
//! undisturbed run. The simulation loses servers at any moment of a step. Here operators' commands, logs, metrics and
//! memory are those of real processes.

use std::{
    fs::{self, File, OpenOptions},
    os::unix::fs::FileExt,
    time::Duration,
};

use longshore_tests::{
    command::{Output, done, longshore},
    conformance::cluster::eventually,
    http,
    process::DEADLINE,
    seed::{Random, spin},
    server::{self, Longshored, ServerOptions},
    soak,
    status::job_status,
    train::{Running, Train},
};
use serde_json::Value;
use tempfile::TempDir;

const DELAYED: [&str; 4] = ["--delay", "1", "--warmup-steps", "5"];

/// A training of three layers that goes on until it is stopped.
fn replicated(ranks: usize, more: &[&str]) -> Train {
    let train = Train::new(1).args(["--layers", "3", "--world-size", &ranks.to_string()]).args(more);
    train.endless().allow("waiting for a server").allow("given up as lost")
}

fn start(train: &Train, ranks: usize) -> Vec<Running> {
    train.clone().args(["--replicas", "2"]).start_ranks(ranks)
}

/// Stops rank 0. The weights must be those of an undisturbed run of as many steps.
fn ends_with_the_same_bits(train: &Train, mut running: Vec<Running>) {
    let end = running.remove(0).stop();
    assert_eq!(end.state_hash, train.hash_after(end.version), "at version {}", end.version);
}

fn give_up(living: &Longshored, lost: &str, more: &[&str]) -> Output {
    let asked = ["scale", "--job", "default", "--servers", living.address(), "--lost", lost];
    longshore([&asked[..], more].concat())
}

/// Waits until the job is on these servers alone, and each shard has two holders: then a wish for them is fulfilled.
fn until_replicated(servers: &[String]) {
    let wish = ["scale", "--job", "default", "--servers", &servers[0], "--to", &servers.join(","), "--wait"];
    done(wish);
}

/// A server of two is lost, and no operator says so. A witness, which keeps no shard, tells which server is lost. A job
/// with one server and a witness is refused, and so is a wish for witnesses alone.
#[test]
fn a_witness_decides_which_of_two_servers_goes_on() {
    let train = replicated(1, &[]).args(["--deadline-s", "15"]);
    let train =
        train.allow("still waiting for a server").allow("not given up yet").allow("cannot be changed yet");
    let mut servers = server::servers(2, &ServerOptions::new().allow("cannot be fetched yet"));
    let witness = ServerOptions::new().args(["--witness"]).start();
    let refused =
        start(&train.clone().servers(&[servers[0].address(), witness.address()].map(String::from)), 1);
    let (refused, _) = refused.into_iter().next().unwrap().fails(DEADLINE);
    assert!(refused.contains("a witness") && refused.contains("longshore scale --add"), "{refused}");
    let mut running = start(&train.clone().servers(&server::addresses(&servers)), 1);
    running[0].until_step(3);
    let scale = |more: &[&str]| {
        longshore([&["scale", "--job", "default", "--servers", servers[0].address()], more].concat())
    };
    let refused = scale(&["--to", witness.address()]);
    assert!(refused.code == 1 && refused.stderr.contains("witnesses alone"), "{refused:?}");
    let said = scale(&["--add", witness.address(), "--wait"]);
    assert_eq!(said.code, 0, "{said:?}");
    let of_witness = job_status(&[witness.address().to_string()]).servers;
    assert!(of_witness.iter().all(|of| of.pushed_bytes == 0), "{of_witness:?}");
    drop(servers.remove(Random::new().below(2) as usize));
    let left = [servers[0].address(), witness.address()].map(String::from);
    // The loss is decided with the second step from here at the latest. Three more steps allow for output that is still
    // on its way.
    let version = job_status(&left).servers.iter().map(|of| of.version).max().unwrap();
    running[0].until_step(version + 5);
    let end = running.remove(0).stop();
    assert_eq!(end.state_hash, train.hash_after(end.version));
    assert_eq!(job_status(&left).state_hash, Some(end.state_hash));
}

/// An operator gives lost servers up. Some are lost with a rank of their host, and new ones take the place of the
/// first. The last two are not replaced, and one server is left.
#[test]
fn servers_of_a_delayed_job_are_lost_one_after_the_other() {
    const A_RUN: u64 = 10;
    let losses: u64 = soak::pick(2, 100);
    // A rank that starts again in the middle of a step may send owner and replica different gradients.
    let train = replicated(2, &DELAYED).allow("have other gradients");
    let mut random = Random::new();
    for run in 0..losses.div_ceil(A_RUN) {
        let mut servers = server::servers(3, &ServerOptions::new());
        let mut running = start(&train.clone().servers(&server::addresses(&servers)), 2);
        for _ in 0..A_RUN.min(losses - run * A_RUN) {
            let lost = lose_one(&mut servers, &mut running[0], &mut random);
            let new = ServerOptions::new().start();
            let rank = random.below(4) as usize;
            if rank < 2 {
                drop(running.remove(rank).kill());
            }
            let said = give_up(&servers[0], &lost, &["--add", new.address()]);
            assert_eq!(said.code, 0, "{said:?}");
            servers.push(new);
            if rank < 2 {
                let train = train.clone().servers(&server::addresses(&servers[..2]));
                running
                    .insert(rank, train.args(["--replicas", "2"]).start_with(["--rank", &rank.to_string()]));
            }
            until_replicated(&server::addresses(&servers));
        }
        while servers.len() > 1 {
            let lost = lose_one(&mut servers, &mut running[0], &mut random);
            let said = give_up(&servers[0], &lost, &["--wait"]);
            assert_eq!(said.code, 0, "{said:?}");
        }
        running[0].until_steps(5);
        assert_eq!(job_status(&server::addresses(&servers)).servers.len(), 1);
        ends_with_the_same_bits(&train, running);
    }
}

/// Kills a server for good, at a random moment some steps later. Returns its address.
fn lose_one(servers: &mut Vec<Longshored>, rank: &mut Running, random: &mut Random) -> String {
    rank.until_steps(1 + random.below(10));
    spin(random.part_of(Duration::from_millis(50)));
    let lost = servers.remove(random.below(servers.len() as u64) as usize);
    lost.address().to_string()
}

/// Counts the lines in another server's log by which rank 0 says that the server at `lost` is lost.
fn words_of_loss(servers: &[Longshored], lost: usize) -> usize {
    let log = servers[(lost + 1) % 3].log();
    let is_word =
        |of: &&Value| of["fields"]["lost"].as_str().is_some_and(|of| of.contains(servers[lost].address()));
    log.iter().filter(is_word).count()
}

/// Lets ranks train until the job is on all servers.
fn until_back(addresses: &[String], rank: &mut Running) {
    while job_status(addresses).servers.len() < addresses.len() {
        rank.until_steps(1);
    }
}

/// No operator acts. Rank 0 gives up a server that was started again without its state, and one that was silent. The
/// job comes back to both. Then another server dies for good with rank 0, whose next process gives that server up.
#[test]
fn a_job_outlives_servers_that_no_operator_speaks_of() {
    let train = replicated(2, &DELAYED).args(["--deadline-s", "15"]);
    let train =
        train.allow("still waiting for a server").allow("not given up yet").allow("cannot be changed yet");
    // At the end rank 0 and a server die together. In the middle of a step, owner and replica may then have different
    // gradients.
    let train = train.allow("have other gradients");
    let mut random = Random::new();
    let mut servers = server::servers(3, &ServerOptions::new().allow("cannot be fetched yet"));
    let addresses = server::addresses(&servers);
    let mut running = start(&train.clone().servers(&addresses), 2);
    for _ in 0..soak::pick(1, 20) {
        running[0].until_steps(1 + random.below(10));
        spin(random.part_of(Duration::from_millis(50)));
        let at = random.below(3) as usize;
        let before = words_of_loss(&servers, at);
        servers[at].kill_and_restart();
        // The job may be back on the server before a call for its status, so the test reads the log.
        eventually("a word of its loss", || (words_of_loss(&servers, at) > before).then_some(()));
        until_back(&addresses, &mut running[0]);
        until_replicated(&addresses);
    }
    // A server is silent, is given up, and answers again with all that it had.
    let at = random.below(3) as usize;
    let silent = &servers[at];
    let before = words_of_loss(&servers, at);
    silent.process.stop();
    eventually("a word of its loss", || (words_of_loss(&servers, at) > before).then_some(()));
    // Rank 0 ends the job there, or its next plan begins the job anew first.
    let ended = |of: &&Value| {
        ["this server has left the job", "job opened"].iter().any(|said| of["fields"]["message"] == *said)
    };
    let before = silent.log().iter().filter(ended).count();
    silent.process.go_on();
    eventually("the end of the job there", || {
        (silent.log().iter().filter(ended).count() > before).then_some(())
    });
    until_back(&addresses, &mut running[0]);
    until_replicated(&addresses);
    drop(servers.remove(random.below(3) as usize));
    drop(running.remove(0).kill());
    let again = train.clone().servers(&addresses).args(["--replicas", "2"]);
    running.insert(0, again.start_with(["--rank", "0"]));
    running[0].until_steps(5);
    assert_eq!(job_status(&server::addresses(&servers)).servers.len(), 2);
    ends_with_the_same_bits(&train, running);
}

/// A wish moves owners and replicas, and drops the replicas where one server is left.
#[test]
fn servers_of_a_replicated_job_come_and_go() {
    let train = replicated(1, &[]);
    let servers = server::servers(4, &ServerOptions::new());
    let addresses = server::addresses(&servers);
    let mut running = start(&train.clone().servers(&addresses[..2]), 1);
    running[0].until_step(3);
    for to in [&addresses[..4], &addresses[1..4], &addresses[2..3], &addresses[..2]] {
        let wish =
            ["scale", "--job", "default", "--servers", &addresses.join(","), "--to", &to.join(","), "--wait"];
        done(wish);
        assert_eq!(job_status(to).servers.len(), to.len());
    }
    ends_with_the_same_bits(&train, running);
}

/// Flips a bit of master weights in a server's memory, while the only rank is stopped.
fn flip_a_bit(servers: &[Longshored], of: usize, running: &mut Running, random: &mut Random) {
    loop {
        running.process.stop();
        let weights = exported(servers);
        let is_flipped = weights.is_some_and(|weights| {
            let start = random.below(weights.len() as u64 / 4 - 16) as usize * 4;
            flip_where(servers[of].process.id(), &weights[start..start + 64], 1 << random.below(8))
        });
        running.process.go_on();
        if is_flipped {
            return;
        }
        // The rank was stopped in the middle of a decision, so the servers have two versions.
        running.until_steps(1);
    }
}

/// The fp32 master weights of all parameters. None if the servers do not have one version.
fn exported(servers: &[Longshored]) -> Option<Vec<u8>> {
    let folder = TempDir::new().unwrap();
    let out = folder.path().join("weights").display().to_string();
    let servers = server::addresses(servers).join(",");
    let flags = ["--dtype", "f32", "--deadline-s", "2", "--servers", &servers, "--out", &out];
    let said = longshore([&["export", "--job", "default"], &flags[..]].concat());
    let file = fs::read(folder.path().join("weights/model.safetensors")).ok().filter(|_| said.code == 0)?;
    let header = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    Some(file[8 + header..].to_vec())
}

/// Flips a bit of the first byte wherever a process has these bytes in anonymous memory. Returns false if it has none.
fn flip_where(process: u32, bytes: &[u8], bit: u8) -> bool {
    let memory = OpenOptions::new().read(true).write(true).open(format!("/proc/{process}/mem")).unwrap();
    let maps = fs::read_to_string(format!("/proc/{process}/maps")).unwrap();
    // "7f0000000000-7f0000200000 rw-p 00000000 00:00 0" is anonymous memory.
    let anonymous = maps.lines().filter(|line| line.contains(" rw-p ") && line.contains(" 00:00 0"));
    let mut is_there = false;
    for line in anonymous {
        let (start, rest) = line.split_once('-').unwrap();
        let [start, end] =
            [start, rest.split_once(' ').unwrap().0].map(|at| u64::from_str_radix(at, 16).unwrap());
        for at in places(&memory, start..end, bytes) {
            memory.write_all_at(&[bytes[0] ^ bit], at).unwrap();
            is_there = true;
        }
    }
    is_there
}

fn places(memory: &File, range: std::ops::Range<u64>, bytes: &[u8]) -> Vec<u64> {
    let mut found = vec![0; (range.end - range.start) as usize];
    if memory.read_exact_at(&mut found, range.start).is_err() {
        return Vec::new();
    }
    let at = |&at: &usize| found[at..].starts_with(bytes);
    (0..found.len()).step_by(4).filter(at).map(|at| range.start + at as u64).collect()
}

/// A bit flips in a server's memory between two steps. The log and the metrics name it, and the shard gets a second
/// holder again. The engine's tests flip bits of any shard.
#[test]
fn a_delayed_job_outlives_flipped_bits() {
    let train = replicated(2, &DELAYED).allow("has flipped");
    let mut random = Random::new();
    let options = ServerOptions::new().allow("has flipped").args(http::FLAGS);
    let servers = server::servers(2, &options);
    let addresses = server::addresses(&servers);
    let mut running = start(&train.clone().servers(&addresses), 2);
    running[0].until_steps(1 + random.below(10));
    let of = random.below(2) as usize;
    flip_a_bit(&servers, of, &mut running[0], &mut random);
    running[0].until_steps(10);
    until_replicated(&addresses);
    let log = servers[of].process.stderr();
    assert!(log.contains("has flipped in this server's memory") && log.contains("of shard "), "{log}");
    let metrics = http::metrics(&http::address(&servers[of]));
    let value = |name: &str| metrics.iter().find(|(key, _)| key.starts_with(name)).map(|(_, value)| *value);
    assert_eq!(value("longshore_job_broken_shards_total"), Some(1.0));
    assert_eq!(value("longshore_job_unreplicated_shards"), Some(0.0));
    ends_with_the_same_bits(&train, running);
}
