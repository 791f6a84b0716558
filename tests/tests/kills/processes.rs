//! Processes of each role die at random moments of each phase: start, push, decision, update, recovery. The same
//! commands go on to the bits of an undisturbed run.

use longshore_tests::{
    seed::{Random, spin},
    soak,
    status::status,
    train::{Running, Train},
    undisturbed::Undisturbed,
};
use tempfile::TempDir;

use super::{Bed, in_runs};

const STEPS: u64 = 60;
/// Number of kills in one run: few, so that its steps stay few.
const KILLS_A_RUN: u64 = 5;
const DELAYED: &[&str] = &["--delay", "1", "--warmup-steps", "5"];
/// DRAM has room for two of a server's two or three images. All gradients but lent ones are on the drives too.
const ON_DRIVES: &[&str] = &["--spill", "all", "--storage-buffers", "2"];

/// The processes that are killed at once.
#[derive(Clone, Copy, PartialEq)]
enum Victims {
    /// A rank that the seed chooses.
    Rank,
    OneServer,
    /// All servers and ranks, so that no process is left to send a gradient again.
    All,
    /// A server with rank 0, while the other rank lives on. Steps that the other servers decided without the dead
    /// server are taken back.
    RankZeroWithServer,
}

struct Case {
    tier: &'static str,
    servers: usize,
    ranks: usize,
    victims: Victims,
    job: &'static [&'static str],
    /// Further flags of the servers.
    flags: &'static [&'static str],
}

const CASE: Case =
    Case { tier: "nvme", servers: 2, ranks: 1, victims: Victims::OneServer, job: &[], flags: &[] };

/// The ranks of a run, and the progress that rank 0 has printed.
struct World {
    train: Train,
    ranks: Vec<Running>,
    done: u64,
    /// True until the start event of rank 0's present process was read.
    is_new: bool,
}

impl World {
    fn start(train: Train, count: usize) -> World {
        let ranks = (0..count).map(|rank| start(&train, count, rank)).collect();
        World { train, ranks, done: 0, is_new: true }
    }

    /// Lets the run go on to a random moment: some steps later, and then within two steps' time. With `early` the
    /// moment may lie within a start instead. The remaining steps are shared between `lives` such moments.
    fn live(&mut self, random: &mut Random, known: &Undisturbed, lives: u64, early: bool) {
        if early && random.below(4) == 0 {
            return spin(random.part_of(known.startup));
        }
        if std::mem::take(&mut self.is_new) {
            self.done = self.ranks[0].until_started_at() - 1;
        }
        let share = STEPS.saturating_sub(self.done + 2) / lives;
        if share > 0 {
            let steps = 1 + random.below(share);
            self.ranks[0].until_steps(steps);
            self.done += steps;
        }
        spin(random.part_of(known.step * 2));
    }

    /// Kills a rank's process and starts it again. Returns the last step that it printed.
    fn replace(&mut self, rank: usize) -> u64 {
        self.ranks[rank].process.kill();
        let new = start(&self.train, self.ranks.len(), rank);
        let said = std::mem::replace(&mut self.ranks[rank], new).kill();
        said.check_steps();
        self.is_new |= rank == 0;
        said.last_step()
    }
}

fn start(train: &Train, count: usize, rank: usize) -> Running {
    if count == 1 { train.start() } else { train.start_with(["--rank", &rank.to_string()]) }
}

/// Returns the newest version on any server; 0 before the job exists.
fn newest(addresses: &[String]) -> u64 {
    let jobs = status(addresses);
    jobs.iter().flat_map(|job| &job.servers).map(|server| server.version).max().unwrap_or(0)
}

fn survives(case: &Case) {
    let mut random = Random::new();
    let ranks = case.ranks.to_string();
    let job = [case.job, &["--world-size", &ranks]].concat();
    let known = Train::new(STEPS).args(&job).undisturbed();
    for kills in in_runs(soak::pick(4, 75), KILLS_A_RUN) {
        let mut bed = Bed::with(case.tier, case.servers, case.flags);
        let train = Train::new(STEPS).args(&job).args(["--tier", case.tier]).allow("waiting for a server");
        let mut world = World::start(train.servers(&bed.addresses()), case.ranks);
        for kill in 0..kills {
            let early = match case.victims {
                Victims::Rank => true,
                Victims::RankZeroWithServer => false,
                // From the second kill on, the job has its first weights, so a start may be hit.
                _ => kill > 0,
            };
            world.live(&mut random, &known, kills - kill, early);
            strike(case.victims, &mut random, &mut bed, &mut world);
        }
        let mut ranks = world.ranks.into_iter();
        let end = ranks.next().expect("rank 0").finish().end;
        assert_eq!(end.state_hash, known.hash, "after {kills} kills");
        ranks.for_each(|rank| drop(rank.done()));
    }
}

fn strike(victims: Victims, random: &mut Random, bed: &mut Bed, world: &mut World) {
    let one = random.below(bed.servers.len() as u64) as usize;
    let struck = match victims {
        Victims::Rank => 0..0,
        Victims::OneServer | Victims::RankZeroWithServer => one..one + 1,
        Victims::All => 0..bed.servers.len(),
    };
    let rank = match victims {
        Victims::Rank => Some(random.below(world.ranks.len() as u64) as usize),
        Victims::All | Victims::RankZeroWithServer => Some(0),
        Victims::OneServer => None,
    };
    if let Some(rank) = rank {
        world.ranks[rank].process.kill();
    }
    bed.servers[struck.clone()].iter_mut().for_each(|server| server.process.kill());
    bed.servers[struck].iter_mut().for_each(|server| server.restart());
    if let Some(rank) = rank {
        let held = if victims == Victims::Rank { newest(&bed.addresses()) } else { u64::MAX };
        let said = world.replace(rank);
        assert!(held >= said, "step {said} was said and is lost: version {held}");
    }
}

/// A rank dies in any phase. The next process takes over, and no step that was printed is lost.
#[test]
fn a_delayed_job_in_memory_survives_kills_of_either_rank() {
    survives(&Case { tier: "memory", ranks: 2, victims: Victims::Rank, job: DELAYED, ..CASE });
}

/// A server dies alone. Its files have the last durable version, and the living rank sends the rest again.
#[test]
fn an_exact_nvme_job_survives_kills_of_either_server() {
    survives(&CASE);
}

/// All processes die, so the job continues from its files alone. Gradients are lent, and images are on the drives.
#[test]
fn a_delayed_nvme_job_with_lent_gradients_and_all_else_on_drives_survives_kills_of_everything() {
    survives(&Case { victims: Victims::All, job: DELAYED, flags: ON_DRIVES, ..CASE });
}

/// All processes die, so the job continues from a tmpfs alone. Kills also come between a step's micro-steps.
#[test]
fn a_shm_job_survives_kills_of_everything() {
    survives(&Case { tier: "shm", victims: Victims::All, job: &["--micro-steps", "2"], ..CASE });
}

/// The servers take a step back on real files, while a rank that has read the step lives.
#[test]
fn a_delayed_nvme_job_survives_kills_of_rank_zero_with_a_server() {
    survives(&Case { ranks: 2, victims: Victims::RankZeroWithServer, job: DELAYED, ..CASE });
}

/// Worker and server are one process.
#[test]
fn a_delayed_run_with_its_state_on_a_drive_goes_on_by_the_same_command() {
    let (root, mut random) = (TempDir::new().unwrap(), Random::new());
    let known = Train::new(STEPS).args(DELAYED).undisturbed();
    let kept = ["--tier", "nvme", "--state-dir", &root.path().display().to_string()];
    // A kill may tear one of a record's two copies, and the server logs that.
    let train = Train::new(STEPS).args(DELAYED).args(kept).allow("a damaged record is replaced");
    let mut world = World::start(train, 1);
    let mut said = 0;
    for lives in (1..=KILLS_A_RUN).rev() {
        world.live(&mut random, &known, lives, true);
        said = said.max(world.replace(0));
    }
    let last = world.ranks.remove(0).finish();
    // The killed process alone may have known the decision on its last printed step.
    assert!(last.start.embedded && last.start.first_step >= said, "{:?} after step {said}", last.start);
    assert_eq!(last.end.state_hash, known.hash);
}
