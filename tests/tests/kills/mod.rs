//! `kill -9` of each role at any moment, and at critical moments: during an operator's call and during a start. In some
//! tests one rank outlives the other. The simulation covers takeovers, pushes that are cut short, and steps that are
//! taken back.
//!
//! A few kills are made in every run. The soak, `tests/run --soak kills`, makes many.

mod operators;
mod processes;
mod resume;
mod stops;
mod waits;

use longshore_tests::server::{self, Longshored, ServerOptions};
use tempfile::TempDir;

/// Splits the kills over runs of at most `each`, so that a run's steps stay few. Returns each run's kills.
fn in_runs(kills: u64, each: u64) -> impl Iterator<Item = u64> {
    (0..kills.div_ceil(each)).map(move |run| each.min(kills - run * each))
}

/// Servers with jobs on a tier, and one checkpoint folder.
struct Bed {
    /// Declared before the folders, so that drop ends the servers first.
    servers: Vec<Longshored>,
    checkpoints: TempDir,
    _root: TempDir,
}

impl Bed {
    fn new(tier: &str, count: usize) -> Bed {
        Bed::with(tier, count, &[])
    }

    /// Starts servers with further flags.
    fn with(tier: &str, count: usize, flags: &[&str]) -> Bed {
        let root = if tier == "shm" { TempDir::new_in("/dev/shm") } else { TempDir::new() };
        let root = root.expect("a folder for the servers' state");
        let checkpoints = TempDir::new().expect("a folder for checkpoints");
        let options = ServerOptions::new().checkpoint_dir(checkpoints.path()).args(flags);
        let options = options.allow("a damaged record is replaced").allow("stepping back");
        let options =
            if tier == "shm" { options.shm_root(root.path()) } else { options.state_root(root.path()) };
        Bed { servers: server::servers(count, &options), checkpoints, _root: root }
    }

    fn addresses(&self) -> Vec<String> {
        server::addresses(&self.servers)
    }
}
