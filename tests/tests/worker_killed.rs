//! `kill -9` of a worker at any moment costs nothing: the same command continues from the last version, to
//! the same bits.

use std::{thread, time::Duration};

use longshore_tests::{
    conformance::cluster::eventually,
    seed::{Random, spin},
    server::{self, ServerOptions},
    status::status,
    train::{Running, Said, Train},
    undisturbed::Undisturbed,
};

const STEPS: u64 = 120;
const KILLS: u64 = 20;
/// Number of kills in each world of two ranks.
const RANK_KILLS: u64 = 8;

fn undisturbed(job: &[&str]) -> Undisturbed {
    Train::new(STEPS).args(job).undisturbed()
}

/// Lets a worker live until a random moment: during its start, or some steps and a part of two steps later.
/// `lives` are still to come, and share the steps left.
fn live(running: &mut Running, random: &mut Random, known: &Undisturbed, left: u64, lives: u64) {
    let share = left / (lives + 1);
    match random.below(share.max(1) * 2).min(left.saturating_sub(3)) {
        0 => spin(random.part_of(known.startup)),
        steps => {
            running.until_steps(steps);
            spin(random.part_of(known.step * 2));
        }
    }
}

/// Returns the newest version on any server; 0 before the job exists.
fn newest(addresses: &[String]) -> u64 {
    let jobs = status(addresses);
    jobs.iter().flat_map(|job| &job.servers).map(|server| server.version).max().unwrap_or(0)
}

/// Checks that servers hold printed steps, and that no held step is repeated. A commit may still be on its
/// way when its sender dies.
fn check_continued(said: &Said, held_before: u64) {
    said.check_steps();
    let Some(start) = said.start() else { return };
    let next = held_before + 1;
    assert!(
        (next..=next + 1).contains(&start.first_step),
        "the servers held version {held_before}, and the next life began with step {}",
        start.first_step
    );
}

/// Kills rank 0 of a world of one, again and again.
fn survives(servers: usize, job: &[&str]) {
    let mut random = Random::new();
    let known = undisturbed(job);
    let servers = server::servers(servers, &ServerOptions::new());
    let addresses = server::addresses(&servers);
    let train = Train::new(STEPS).args(job).servers(&addresses);
    let (mut held, mut continued) = (0, 0);
    for life in 0..KILLS {
        let mut running = train.start();
        live(&mut running, &mut random, &known, STEPS - held, KILLS - life);
        let said = running.kill();
        check_continued(&said, held);
        continued += u64::from(said.start().is_some_and(|start| start.first_step > 1));
        held = newest(&addresses);
        assert!(held >= said.last_step(), "step {} was said and is lost: version {held}", said.last_step());
    }
    let last = train.run();
    check_continued(&last.said, held);
    assert!(last.start.first_step > 1 && continued > KILLS / 2, "only {continued} lives continued a job");
    assert_eq!(last.end.state_hash, known.hash);
}

#[test]
fn an_exact_job_survives_kills_of_its_worker() {
    survives(1, &[]);
}

#[test]
fn an_exact_job_on_two_servers_survives_kills_of_its_worker() {
    survives(2, &["--micro-steps", "2"]);
}

#[test]
fn a_delayed_job_on_two_servers_survives_kills_of_its_worker() {
    survives(2, &["--delay", "1", "--warmup-steps", "5"]);
}

/// Either rank of a world of two is killed; the other one waits for it.
fn ranks_survive(job: &[&str]) {
    let mut random = Random::new();
    let job = [job, &["--world-size", "2"]].concat();
    let known = undisturbed(&job);
    let servers = server::servers(2, &ServerOptions::new());
    let addresses = server::addresses(&servers);
    let train = Train::new(STEPS).args(&job).servers(&addresses);
    let mut ranks = [train.start_with(["--rank", "0"]), train.start_with(["--rank", "1"])];
    for life in 0..RANK_KILLS {
        let left = STEPS - newest(&addresses);
        live(&mut ranks[0], &mut random, &known, left, RANK_KILLS - life);
        let rank = random.below(2) as usize;
        ranks[rank].process.kill();
        let held = newest(&addresses);
        let again = train.start_with(["--rank", &rank.to_string()]);
        let said = std::mem::replace(&mut ranks[rank], again).kill();
        said.check_steps();
        assert!(held >= said.last_step(), "step {} was said and is lost: version {held}", said.last_step());
    }
    let [rank0, mut rank1] = ranks;
    let last = rank0.finish();
    assert_eq!(rank1.process.code(), 0, "rank 1 failed: {}", rank1.process.stderr());
    assert_eq!(last.end.state_hash, known.hash);
}

#[test]
fn an_exact_job_survives_kills_of_either_rank() {
    ranks_survive(&[]);
}

#[test]
fn a_delayed_job_survives_kills_of_either_rank() {
    ranks_survive(&["--delay", "1", "--warmup-steps", "5", "--micro-steps", "2"]);
}

/// A rank that is silent past the deadline, as during an evaluation, is waited for while its process lives.
/// Once it is gone, the wait names it soon.
#[test]
fn a_rank_that_is_slow_is_waited_for_past_the_deadline() {
    let known = undisturbed(&["--world-size", "2"]);
    let waited_for = |slow: usize| {
        let server = ServerOptions::new().start();
        let train = Train::new(STEPS).args(["--world-size", "2", "--deadline-s", "2"]);
        let train = train.servers(&[server.address().to_string()]);
        let mut ranks = ["0", "1"].map(|rank| train.start_with(["--rank", rank]));
        ranks[0].until_step(5);
        ranks[slow].process.stop();
        // From rank 0 a decision may be missing instead of a gradient.
        let what = if slow == 0 { "step " } else { "shard " };
        let named = [server.address(), what, &format!("from rank {slow}"), "of at most 1800 s"];
        let waits = |said: String| named.iter().all(|word| said.contains(word)).then_some(());
        eventually("a wait past the deadline", || waits(ranks[1 - slow].process.stderr()));
        ranks[slow].process.go_on();
        let [rank0, mut rank1] = ranks;
        assert_eq!(rank0.finish().end.state_hash, known.hash, "rank {slow} was slow");
        assert_eq!(rank1.process.code(), 0, "rank 1 failed: {}", rank1.process.stderr());
    };
    thread::scope(|scope| {
        scope.spawn(|| waited_for(0));
        waited_for(1);
    });
}

#[test]
fn a_rank_that_does_not_come_back_is_named_in_time() {
    let server = ServerOptions::new().start();
    let train = Train::new(STEPS).args(["--world-size", "2", "--deadline-s", "2"]);
    let train = train.servers(&[server.address().to_string()]);
    let mut rank0 = train.start_with(["--rank", "0"]);
    let rank1 = train.start_with(["--rank", "1"]);
    rank0.until_step(5);
    rank1.kill();
    let (stderr, said) = rank0.fails(Duration::from_secs(15));
    let waiting = format!("step {}", said.last_step() + 1);
    assert!(stderr.contains("rank 1") && stderr.contains(&waiting), "{stderr}");
    assert!(stderr.contains("raise the deadline"), "no remedy: {stderr}");
}
