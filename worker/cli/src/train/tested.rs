//! Hooks for tests of the trainer: gradients that differ from process to process, and a checksum of the weights in
//! use.

use std::{
    env,
    hash::{DefaultHasher, Hash, Hasher},
    process,
};

use longshore_proto::checksum::Crc32;
use longshore_worker::{error::Result, pull::Feed};

/// An environment variable with a number. If set, gradients differ from process to process, as in a framework
/// whose arithmetic is not deterministic.
const PERTURB: &str = "LONGSHORE_TEST_PERTURB";

#[derive(Clone, Copy)]
pub(super) struct Noise(f32);

impl Noise {
    pub(super) fn from_environment() -> Option<Noise> {
        let seed = env::var_os(PERTURB)?;
        let mut hasher = DefaultHasher::new();
        (seed, process::id()).hash(&mut hasher);
        // A factor above 1 and at most 2: every nonzero element changes, also in 16 bits, and the run still learns.
        Some(Noise(1.0 + (1 + hasher.finish() % 64) as f32 / 64.0))
    }

    pub(super) fn add(self, gradient: &mut [f32]) {
        gradient.iter_mut().for_each(|value| *value *= self.0);
    }
}

/// Returns the CRC-32 of all of a version's weights, as they arrived.
pub(super) fn checksum(feed: &Feed, elements: u64) -> Result<u32> {
    let mut sum = Crc32::new();
    feed.pieces(0..elements, |_, bytes| sum.update(bytes))?;
    Ok(sum.value())
}
