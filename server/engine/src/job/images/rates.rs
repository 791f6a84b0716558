//! The rates of a job whose worker amends its weights: what it multiplies its gradient by, beside the images.

use std::{
    ops::Range,
    sync::{PoisonError, RwLock, RwLockWriteGuard},
};

use longshore_proto::{JobSpec, Step, Version, limits::RATE_ELEMENTS};

use crate::ids::OwnedShard;

/// The rates of the owned shards. They are few, so they stay in DRAM. The next process of this server makes those of its
/// version again from the state.
pub(in crate::job) struct Rates {
    /// By owned shard, then by version parity. It is empty in a job without rates.
    shards: Vec<[RwLock<RatesOf>; 2]>,
}

/// The rates of one shard at one version.
pub(in crate::job) struct RatesOf {
    /// The version that the values belong to. None while they are not valid.
    version: Option<Version>,
    /// One for each group of elements of the shard.
    values: Vec<f32>,
}

/// How many bytes the rates of so many elements take on a server.
pub(in crate::job) fn need(spec: &JobSpec, elements: u64) -> u64 {
    if spec.worker_local { 2 * elements / RATE_ELEMENTS * size_of::<f32>() as u64 } else { 0 }
}

impl RatesOf {
    /// The values, which are to be made. They are not valid until [`RatesOf::set`].
    pub(in crate::job) fn overwrite(&mut self) -> &mut [f32] {
        self.version = None;
        &mut self.values
    }

    pub(in crate::job) fn set(&mut self, version: Option<Version>) {
        self.version = version;
    }
}

impl Rates {
    /// `lengths` has the elements of each owned shard.
    pub(in crate::job) fn new(spec: &JobSpec, lengths: &[usize]) -> Rates {
        let of = |&length: &usize| {
            [0, 1].map(|_| {
                RwLock::new(RatesOf { version: None, values: vec![0.0; length / RATE_ELEMENTS as usize] })
            })
        };
        Rates { shards: if spec.worker_local { lengths.iter().map(of).collect() } else { Vec::new() } }
    }

    fn place(&self, owned: OwnedShard, version: Version) -> Option<&RwLock<RatesOf>> {
        self.shards.get(owned.index()).map(|shard| &shard[version.0 as usize % 2])
    }

    /// The place in which to make a shard's rates of a version; None in a job without rates.
    pub(in crate::job) fn to_make(
        &self,
        owned: OwnedShard,
        version: Version,
    ) -> Option<RwLockWriteGuard<'_, RatesOf>> {
        Some(self.place(owned, version)?.write().unwrap_or_else(PoisonError::into_inner))
    }

    /// Whether the rates of a version are there.
    pub(in crate::job) fn are_of(&self, owned: OwnedShard, version: Version) -> bool {
        let of = |rates: &RwLock<RatesOf>| rates.read().unwrap_or_else(PoisonError::into_inner).version;
        self.place(owned, version).is_some_and(|rates| of(rates) == Some(version))
    }

    /// The rates of the groups that some elements of a shard have a part of, as little-endian bytes. None if those of
    /// the version are not there.
    pub(super) fn read(&self, owned: OwnedShard, version: Version, elements: Range<u64>) -> Option<Vec<u8>> {
        let rates = self.place(owned, version)?.read().unwrap_or_else(PoisonError::into_inner);
        let groups = elements.start / RATE_ELEMENTS..elements.end.div_ceil(RATE_ELEMENTS);
        let values = &rates.values[groups.start as usize..groups.end as usize];
        (rates.version == Some(version)).then(|| values.iter().flat_map(|rate| rate.to_le_bytes()).collect())
    }

    /// Gives a skipped step's version the rates of the version before.
    pub(super) fn carry(&self, owned: OwnedShard, step: Step) {
        let before = step.0.checked_sub(1).and_then(|version| self.place(owned, Version(version)));
        let Some((before, mut after)) = before.zip(self.to_make(owned, step.version())) else { return };
        let before = before.read().unwrap_or_else(PoisonError::into_inner);
        after.values.copy_from_slice(&before.values);
        let whole = before.version.is_some_and(|version| version.0 + 1 == step.0);
        after.version = whole.then_some(step.version());
    }

    /// Forgets which versions the rates are of.
    pub(super) fn forget(&self) {
        for rates in self.shards.iter().flatten() {
            rates.write().unwrap_or_else(PoisonError::into_inner).version = None;
        }
    }
}
