//! A job's need on one server, computed before anything is allocated.

use longshore_proto::{
    Fault, JobSpec, Layout, ShardId,
    limits::{CONNECTION_BYTES, DATA_CONNECTIONS, SPILLED_PULL_BYTES},
};

use super::{gradients, images};
use crate::{
    admission::Need,
    tier::{self, Storage, StoreNeed, StoredJob},
};

impl StoredJob {
    /// Returns the memory and space that opening the job takes.
    ///
    /// # Errors
    /// For a spec or a placement that no job can have.
    pub fn need(&self, storage: &Storage) -> Result<Need, Fault> {
        let layout = self.spec.validate()?;
        self.placement.validate(layout.shards())?;
        Ok(Need::of(&self.spec, &layout, &self.placement.owned(self.server), storage))
    }
}

impl Need {
    pub fn of(spec: &JobSpec, layout: &Layout, owned: &[ShardId], storage: &Storage) -> Need {
        // Frozen shards have neither images beside their state, nor gradients.
        let trained = owned.iter().filter(|&&shard| !layout.is_frozen(shard));
        let elements: u64 = trained.map(|&shard| layout.shard_len(shard)).sum();
        let slots = spec.gradient_slots() as u64;
        let StoreNeed { state, buffers, disk, written } = tier::need(spec, layout, owned, storage);
        let (contributions, accumulators) = if storage.spills(spec) {
            gradients::spilled::need(spec, layout, owned)
        } else {
            let wire = spec.gradient_dtype.bytes();
            owned.iter().fold((0, 0), |(contributions, accumulators), &shard| {
                let (elements, contributors) = (layout.shard_len(shard), layout.contributors(shard));
                let sum = if spec.accumulates(contributors) { 4 } else { 0 };
                let count = contributors.len() as u64;
                (contributions + elements * wire * slots * count, accumulators + elements * sum * slots)
            })
        };
        let connection =
            CONNECTION_BYTES + if storage.spills(spec) || spec.has_frozen() { SPILLED_PULL_BYTES } else { 0 };
        Need {
            state,
            buffers,
            disk,
            written,
            images: if storage.spills(spec) {
                images::window::need(spec, layout, owned, storage)
            } else {
                elements * spec.image_dtype.bytes() * 2
            },
            contributions,
            transfers: u64::from(spec.world_size) * (DATA_CONNECTIONS * connection) as u64,
            accumulators,
        }
    }
}
