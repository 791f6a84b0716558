//! Factory of tiers, the only file of the engine that knows them by kind. Computes a tier's need, opens it,
//! and inspects its files.

use std::sync::Arc;

use longshore_proto::{Fault, JobSpec, Layout, ShardId, TierKind};

use super::{
    Header,
    contract::{Opened, Recovered, Store},
    fault::{corrupt, exhausted},
    folder::Folder,
    memory::MemoryTier,
    need::StoreNeed,
    nvme::{self, NvmeTier},
    report::Report,
    shm::{self, ShmTier},
    state::Shape,
    storage::{Inputs, Spill, Storage},
};
use crate::threads::ThreadPool;

/// Returns the need of a job's tier on this server.
pub fn need(spec: &JobSpec, layout: &Layout, owned: &[ShardId], storage: &Storage) -> StoreNeed {
    let state = |&shard: &ShardId| {
        Shape::of_shard(spec, layout, shard).bytes(layout.shard_len(shard) as usize) as u64
    };
    let state = owned.iter().map(state).sum();
    match spec.tier {
        TierKind::Memory => StoreNeed { state, ..StoreNeed::default() },
        // Files in a tmpfs take DRAM.
        TierKind::Shm => {
            StoreNeed { state, buffers: shm::overhead(spec, layout, owned), ..StoreNeed::default() }
        }
        TierKind::Nvme => nvme::need(spec, layout, owned, storage),
    }
}

/// Returns true if a job's tier keeps the memory of the job's buffers, so that nobody else allocates it.
pub fn keeps_buffers(spec: &JobSpec) -> bool {
    spec.tier == TierKind::Shm
}

impl Storage {
    /// Returns true if this job's images live on the drives alone, and its gradients live there too.
    pub fn spills(&self, spec: &JobSpec) -> bool {
        spec.tier == TierKind::Nvme && self.spill == Spill::All
    }
}

/// Makes the job's store, or finds the existing one. `buffers` is the size of the job's buffers, for a tier
/// that keeps them. `pool` will update the state. `notify` is called after each change that a thread may wait
/// for.
///
/// # Errors
/// After an error, no file or folder that was made here stays behind.
pub fn open(
    inputs: &Inputs<'_>,
    buffers: usize,
    pool: &ThreadPool,
    notify: Box<dyn Fn() + Send + Sync>,
) -> Result<Opened, Fault> {
    match inputs.spec.tier {
        TierKind::Memory => open_memory(inputs, pool),
        TierKind::Shm => open_shm(inputs, buffers, pool),
        TierKind::Nvme => open_nvme(inputs, notify),
    }
}

fn open_memory(inputs: &Inputs<'_>, pool: &ThreadPool) -> Result<Opened, Fault> {
    let lengths: Vec<usize> =
        inputs.owned.iter().map(|&shard| inputs.layout.shard_len(shard) as usize).collect();
    let shapes = Shape::of_shards(inputs.spec, inputs.layout, inputs.owned);
    let tier = MemoryTier::allocate(&lengths, shapes, pool).map_err(exhausted)?;
    let tier = Arc::new(tier);
    let store = Store {
        state: tier.clone(),
        together: Some(tier),
        durable: None,
        behind: None,
        kept: None,
        images: None,
        gradients: None,
    };
    Ok(Opened { store, buffers: None, recovered: Recovered::Nothing })
}

fn open_shm(inputs: &Inputs<'_>, buffers: usize, pool: &ThreadPool) -> Result<Opened, Fault> {
    let (tier, buffers, interrupted) = ShmTier::open(inputs, buffers, pool)?;
    let tier = Arc::new(tier);
    let store = Store {
        state: tier.clone(),
        together: None,
        durable: Some(tier.clone()),
        behind: None,
        kept: Some(tier),
        images: None,
        gradients: None,
    };
    let recovered = interrupted.map_or(Recovered::Nothing, Recovered::Interrupted);
    Ok(Opened { store, buffers: Some(buffers), recovered })
}

fn open_nvme(inputs: &Inputs<'_>, notify: Box<dyn Fn() + Send + Sync>) -> Result<Opened, Fault> {
    let (tier, record) = NvmeTier::open(inputs, notify)?;
    let gradients = inputs.storage.spills(inputs.spec).then(|| tier.create_gradients(inputs));
    // A store that was just made must not stay behind.
    let gradients = gradients.transpose().inspect_err(|_| {
        _ = record.is_none().then(|| tier.remove());
    })?;
    let tier = Arc::new(tier);
    let store = Store {
        state: tier.clone(),
        together: None,
        durable: Some(tier.clone()),
        behind: Some(tier.clone()),
        kept: None,
        images: tier.stores_images().then(|| tier.clone() as _),
        gradients: gradients.map(|gradients| Arc::new(gradients) as _),
    };
    Ok(Opened { store, buffers: None, recovered: record.map_or(Recovered::Nothing, Recovered::Version) })
}

/// Reads and verifies a tier's files in a folder that no server uses.
pub(super) fn inspect(folder: &Folder, header: Header) -> Result<Report, Fault> {
    match header.tier {
        TierKind::Nvme => nvme::inspect(folder, header),
        TierKind::Shm => shm::inspect(folder, header),
        TierKind::Memory => Err(corrupt(
            format!("{} (tier memory)", folder.path.display()),
            "tier nvme or shm",
            "the header is not one that a server wrote: restore a checkpoint",
        )),
    }
}
