//! A server dies during an operator's call. The call may fail; a second call succeeds, and nothing is lost.

use std::time::{Duration, Instant};

use longshore_tests::{
    binaries,
    command::{done, longshore},
    process::{DEADLINE, Process},
    seed::{Random, spin},
    soak,
    status::{JobStatus, status},
    train::Train,
};

use super::Bed;

const SERVERS: usize = 3;
const STEPS: u64 = 12;

struct Stage {
    bed: Bed,
    servers: String,
    train: Train,
    random: Random,
}

impl Stage {
    /// Trains a job, on servers of a tier that outlives them.
    fn set(tier: &str) -> Stage {
        let bed = Bed::new(tier, SERVERS);
        let train = Train::new(STEPS).args(["--tier", tier]).servers(&bed.addresses());
        train.run();
        Stage { servers: bed.addresses().join(","), bed, train, random: Random::new() }
    }

    fn arguments(&self, mut call: Vec<String>) -> Vec<String> {
        call.extend(["--servers".to_string(), self.servers.clone()]);
        call
    }

    /// Kills a server during a call, restarts it, and repeats the call until it succeeds. `call` gets the number of the
    /// try. Returns the duration of the call that succeeded.
    fn disturb(
        &mut self,
        call: impl Fn(u32) -> Vec<String>,
        takes: Duration,
        works: impl Fn(&str, i32) -> bool,
    ) -> Duration {
        let arguments = self.arguments(call(0));
        let mut first = Process::start("longshore", binaries::command("longshore").args(&arguments));
        spin(self.random.part_of(takes));
        let victim = self.random.below(SERVERS as u64) as usize;
        self.bed.servers[victim].process.kill();
        first.wait(DEADLINE);
        self.bed.servers[victim].restart();
        let start = Instant::now();
        for attempt in 1.. {
            let (begun, arguments) = (Instant::now(), self.arguments(call(attempt)));
            let output = longshore(&arguments);
            if works(&output.stderr, output.code) {
                return begun.elapsed();
            }
            assert!(start.elapsed() < DEADLINE, "{arguments:?} does not work again: {output:?}");
        }
        unreachable!("the deadline comes before the last attempt")
    }

    fn state(&self) -> Option<JobStatus> {
        status(&self.bed.addresses()).pop()
    }
}

fn call(arguments: &[&str]) -> Vec<String> {
    arguments.iter().map(ToString::to_string).collect()
}

fn succeeds(_: &str, code: i32) -> bool {
    code == 0
}

/// The second call finds the first one's checkpoint, or makes it.
#[test]
fn a_kill_inside_a_checkpoint_or_an_export_costs_nothing_but_a_second_call() {
    let kills = soak::pick(2, 60);
    let mut stage = Stage::set("nvme");
    let hash = stage.state().and_then(|state| state.state_hash);
    assert!(hash.is_some());
    let mut takes = [Duration::from_millis(300); 2];
    for kill in 0..kills {
        let which = (kill % 2) as usize;
        let folder = stage.bed.checkpoints.path().join(format!("exported-{kill}"));
        let checkpoint = |_| call(&["checkpoint", "--name", &format!("kill-{kill}")]);
        // An interrupted call leaves files, which another call does not overwrite.
        let export = |attempt| call(&["export", "--out", &format!("{}-{attempt}", folder.display())]);
        takes[which] = if which == 0 {
            // If the checkpoint was sealed before the kill, the repeated call says so.
            stage.disturb(checkpoint, takes[which], |stderr, code| code == 0 || stderr.contains("sealed"))
        } else {
            stage.disturb(export, takes[which], succeeds)
        };
        assert_eq!(stage.state().and_then(|state| state.state_hash), hash, "after kill {kill}");
    }
}

/// The first kill comes while the job is deleted, and the second while it is restored.
#[test]
fn a_kill_inside_a_delete_or_a_restore_leaves_a_job_that_can_be_deleted_and_restored() {
    let kills = soak::pick(2, 60);
    let mut stage = Stage::set("nvme");
    let hash = stage.state().and_then(|state| state.state_hash);
    done(stage.arguments(call(&["checkpoint", "--name", "kept"])));
    let takes = Duration::from_millis(300);
    for kill in 0..kills / 2 {
        let addresses = stage.bed.addresses();
        let gone = move |_: &str, code: i32| code == 0 || status(&addresses).is_empty();
        stage.disturb(|_| call(&["delete", "--job", "default"]), takes, gone);
        // The trainer's --resume opens the job everywhere and restores it. The job was trained to its last step, so the
        // trainer ends then.
        let resumed = stage.train.start_with(["--resume"]);
        spin(stage.random.part_of(takes));
        let victim = stage.random.below(SERVERS as u64) as usize;
        stage.bed.servers[victim].kill_and_restart();
        drop(resumed);
        let run = stage.train.start_with(["--resume"]).finish();
        assert_eq!(Some(run.end.state_hash), hash, "after kill {kill}");
    }
}

/// A server dies while it steps back. The next run makes the last step again.
#[test]
fn a_kill_inside_a_step_back_leaves_one_version_or_the_other() {
    let kills = soak::pick(2, 40);
    for kill in 0..kills {
        let mut stage = Stage::set("nvme");
        let hash = stage.state().and_then(|state| state.state_hash);
        let version = (STEPS - 1).to_string();
        let step_back = |_| call(&["step-back", "--job", "default", "--version", &version]);
        stage.disturb(step_back, Duration::from_millis(200), succeeds);
        let run = stage.train.run();
        assert_eq!(run.start.first_step, STEPS, "the last step is made again");
        assert_eq!(Some(run.end.state_hash), hash, "after kill {kill}");
    }
}
