//! Bounds of a step: an update of as many parameters, each direction of the wire, and the cores. Each is measured
//! alone, in turn with steps.

use std::time::{Duration, Instant};

use longshore_engine::threads::available_threads;

use super::Args;
use crate::bench::{median, process_cpu, update::Bare, wire};

/// The most parameters of the bare update, at 16 bytes each. Larger jobs are taken to run at the same pace, so
/// they need not fit in memory.
const MOST_BARE: u64 = 200_000_000;

pub(super) struct Limits {
    bare: Bare,
    /// Ratio of the steps' parameters to the bare update's.
    times: f64,
    wire: wire::BenchRank,
    /// Bytes of all parameters on the wire, in one direction.
    bytes: f64,
    /// Milliseconds of each round: push, pull, update, and CPU time over cores.
    rounds: Vec<[f64; 4]>,
    cpu: f64,
}

impl Limits {
    pub(super) fn new(args: &Args) -> anyhow::Result<Limits> {
        let bare = args.params.min(MOST_BARE);
        Ok(Limits {
            bare: Bare::new(bare, available_threads(), args.formats())?,
            times: args.params as f64 / bare as f64,
            wire: wire::BenchRank::alone(args.connections, args.transport())?,
            bytes: args.params as f64 * 2.0,
            rounds: Vec::new(),
            cpu: f64::NAN,
        })
    }

    pub(super) fn time_steps<T>(&mut self, steps: usize, wait: impl FnOnce() -> T) {
        let before = process_cpu();
        wait();
        let spent: Duration = process_cpu().saturating_sub(before);
        self.cpu = spent.as_secs_f64() * 1e3 / steps as f64 / available_threads() as f64;
    }

    pub(super) fn measure(&mut self, keep: bool) -> anyhow::Result<()> {
        let begun = Instant::now();
        self.bare.pass();
        let update = begun.elapsed().as_secs_f64() * 1e3 * self.times;
        let ms = |gb_per_s: f64| self.bytes / 1e6 / gb_per_s;
        let round = [ms(self.wire.push()?.gb_per_s()), ms(self.wire.pull()?.gb_per_s()), update, self.cpu];
        if keep {
            self.rounds.push(round);
        }
        Ok(())
    }

    pub(super) fn update_gb(&self) -> f64 {
        self.bare.bytes() * self.times / 1e9
    }

    pub(super) fn ms(&self) -> [f64; 4] {
        [0, 1, 2, 3].map(|limit| median(&self.rounds.iter().map(|round| round[limit]).collect::<Vec<_>>()))
    }
}
