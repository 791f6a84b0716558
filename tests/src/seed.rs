//! Repeatable random tests. LONGSHORE_SEED sets the seed. A failing test prints the seed, and a slow test always does.

use std::{
    env,
    io::{self, Write},
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use rand_chacha::{
    ChaCha8Rng,
    rand_core::{Rng, SeedableRng},
};

use crate::soak;

const VARIABLE: &str = "LONGSHORE_SEED";

/// A test's source of random numbers.
pub struct Random {
    seed: u64,
    generator: ChaCha8Rng,
}

impl Random {
    /// Takes the seed from LONGSHORE_SEED, or from the clock.
    pub fn new() -> Random {
        let given = env::var(VARIABLE).ok().map(|text| {
            text.parse().unwrap_or_else(|_| panic!("{VARIABLE} is {text:?}, but must be a whole number"))
        });
        let clock = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |now| now.as_nanos() as u64);
        let seed = given.unwrap_or_else(clock);
        if soak::runs() {
            // The test harness would capture `eprintln!` unless the test fails.
            let test = thread::current().name().unwrap_or("a test").to_string();
            let _ = writeln!(io::stderr(), "{test}: {VARIABLE}={seed}");
        }
        Random { seed, generator: ChaCha8Rng::seed_from_u64(seed) }
    }

    /// Returns a whole number below `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        self.generator.next_u64() % end
    }

    /// Returns a random time of at most `longest`.
    pub fn part_of(&mut self, longest: Duration) -> Duration {
        longest.mul_f64(self.generator.next_u64() as f64 / u64::MAX as f64)
    }
}

impl Default for Random {
    fn default() -> Random {
        Random::new()
    }
}

impl Drop for Random {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("the random moments came from {VARIABLE}={}: set it to repeat them", self.seed);
        }
    }
}

/// Spins for `time`, to reach a random moment. A sleep would be rounded up to the scheduler's tick, which is
/// longer than many of these times.
pub fn spin(time: Duration) {
    let start = Instant::now();
    while start.elapsed() < time {
        std::hint::spin_loop();
    }
}
