//! Undisturbed training runs, whose bits other runs must reproduce. Each of them runs once, and its results are kept
//! for all tests.

use std::{
    fs::{self, File},
    hash::{DefaultHasher, Hash, Hasher},
    io::{Read, Seek, Write},
    path::Path,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};

use crate::train::{Run, Train};

/// The folder of remembered runs, outside of cargo's target folder. `tests/run` keeps its other files beside this
/// folder.
const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../.cache/undisturbed");

/// The state hash at a run's end, and the times that the run took.
#[derive(Serialize, Deserialize)]
pub struct Undisturbed {
    pub hash: String,
    /// Time from the start of the process to its first step.
    pub startup: Duration,
    pub step: Duration,
}

impl Undisturbed {
    /// Returns the remembered run with the same flags, program and CPU. If there is none, trains on an embedded server.
    ///
    /// The CPU belongs to the key because matrix kernels differ by CPU, and with them the bits of a training.
    pub(crate) fn of(train: &Train) -> Undisturbed {
        fs::create_dir_all(FOLDER).expect("a folder in .cache");
        let path = Path::new(FOLDER).join(format!("{:016x}.json", key(train)));
        let file = File::options().read(true).write(true).create(true).truncate(false).open(path);
        let mut file = file.expect("a file in .cache");
        // A process of another test may be making the same run: the lock waits for its result.
        file.lock().expect("a lock");
        let mut known = String::new();
        file.read_to_string(&mut known).expect("what is remembered");
        if let Ok(known) = serde_json::from_str(&known) {
            return known;
        }
        let made = Undisturbed::run(train);
        file.set_len(0).expect("an empty file");
        file.rewind().expect("its start");
        file.write_all(&serde_json::to_vec(&made).expect("JSON")).expect("the result");
        made
    }

    fn run(train: &Train) -> Undisturbed {
        let begun = Instant::now();
        let mut running = train.start();
        running.until_steps(1);
        let startup = begun.elapsed();
        let Run { end, .. } = running.finish();
        Undisturbed { hash: end.state_hash, startup, step: Duration::from_secs_f64(end.step_ms / 1e3) }
    }
}

/// Returns a key that differs for other flags, text, program or CPU.
fn key(train: &Train) -> u64 {
    let mut hasher = DefaultHasher::new();
    let command = train.command();
    fs::read(command.get_program()).expect("the program").hash(&mut hasher);
    train.hash_into(&mut hasher);
    let cpu = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    cpu.lines()
        .filter(|line| line.starts_with("model name") || line.starts_with("flags"))
        .take(2)
        .for_each(|line| line.hash(&mut hasher));
    hasher.finish()
}
