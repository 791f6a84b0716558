//! `kill -9` of a run that is worker and server in one process. The same command continues from its folder,
//! to the bits of an undisturbed run.

use longshore_tests::{
    seed::{Random, spin},
    train::Train,
};
use tempfile::TempDir;

const STEPS: u64 = 60;
const KILLS: u64 = 4;

fn survives(tier: &str, root: &TempDir, job: &[&str]) {
    let mut random = Random::new();
    let known = Train::new(STEPS).args(job).undisturbed();
    let folder = if tier == "nvme" { "--state-dir" } else { "--shm-dir" };
    let train =
        Train::new(STEPS).args(job).args(["--tier", tier, folder, &root.path().display().to_string()]);
    // A kill while a record is replaced leaves the record's other copy.
    let train = train.allow("a damaged record is replaced");
    let (mut done, mut continued) = (0, 0);
    for kill in 0..KILLS {
        let mut running = train.start();
        // Some kills come in the first moments, while the job is made or recovered.
        if random.below(4) > 0 {
            running.until_steps(1 + random.below((STEPS - done).saturating_sub(2) / (KILLS - kill)).max(1));
            spin(random.part_of(known.step * 2));
        } else {
            spin(random.part_of(known.startup));
        }
        let said = running.kill();
        said.check_steps();
        if let Some(start) = said.start() {
            // The killed process alone may have known the decision on its last printed step.
            assert!(
                start.first_step >= done,
                "step {done} was said, and the next life began with {}",
                start.first_step
            );
            assert!(start.embedded);
            continued += u64::from(start.first_step > 1);
        }
        done = done.max(said.last_step());
    }
    let last = train.run();
    assert!(last.start.first_step >= done && last.start.first_step > 1, "{:?} after step {done}", last.start);
    assert_eq!(last.end.state_hash, known.hash, "after {KILLS} kills, {continued} of lives that continued");
}

#[test]
fn a_run_with_its_state_on_a_drive_goes_on_by_the_same_command() {
    survives("nvme", &TempDir::new().unwrap(), &[]);
}

#[test]
fn a_delayed_run_with_its_state_on_a_drive_goes_on_by_the_same_command() {
    survives("nvme", &TempDir::new().unwrap(), &["--delay", "1", "--warmup-steps", "5"]);
}

#[test]
fn a_run_with_its_state_in_a_tmpfs_goes_on_by_the_same_command() {
    survives("shm", &TempDir::new_in("/dev/shm").unwrap(), &["--micro-steps", "2"]);
}

/// Returns the message of a command refused for its arguments.
fn wrong_use(train: &Train) -> String {
    let mut running = train.start();
    assert_eq!(running.process.code(), 2, "{}", running.process.stderr());
    running.process.stderr()
}

#[test]
fn without_a_folder_it_is_refused_with_a_remedy() {
    for (tier, flag) in [("nvme", "--state-dir"), ("shm", "--shm-dir")] {
        let stderr = wrong_use(&Train::new(2).args(["--tier", tier]));
        assert!(stderr.contains(flag) && stderr.contains("continues a run that was killed"), "{stderr}");
    }
    let stderr = wrong_use(&Train::new(2).args(["--state-dir", "/tmp"]));
    assert!(stderr.contains("--tier nvme"), "{stderr}");
}
