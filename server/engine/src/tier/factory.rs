//! Factory of tiers, the only file of the engine that knows them by kind. Each `match` refuses to compile without a new
//! tier's arm.

use std::path::PathBuf;

use longshore_proto::{Fault, JobSpec, Layout, Lifetime, Placement, ServerId, ShardId, TierKind};
use rustix::fs::statvfs;

use super::{
    Header,
    contract::Opened,
    fault::corrupt,
    folder::{ALL_PLACES, Folder},
    inspect::{KeptBuffers, Report},
    memory, nvme, shm,
    state::Shape,
    storage::{Inputs, Spill, Storage, StoreNeed},
};
use crate::{admission::Need, threads::ThreadPool};

/// Returns the need of a job's tier on this server.
pub fn need(spec: &JobSpec, layout: &Layout, owned: &[ShardId], storage: &Storage) -> StoreNeed {
    let states = owned.iter().map(|&shard| state(spec, layout, shard));
    let in_dram = StoreNeed { state: states.sum(), ..StoreNeed::default() };
    match spec.tier {
        TierKind::Memory => in_dram,
        // Files in a tmpfs take DRAM.
        TierKind::Shm => StoreNeed { buffers: shm::overhead(spec, layout), ..in_dram },
        TierKind::Nvme => nvme::need(spec, layout, owned, storage),
    }
}

/// Returns what one more shard adds to a need. Buffers and tables serve all shards, and resident shards share one
/// limit.
pub(crate) fn shard_need(spec: &JobSpec, layout: &Layout, shard: ShardId, spills: bool) -> StoreNeed {
    match spec.tier {
        TierKind::Memory | TierKind::Shm => {
            StoreNeed { state: state(spec, layout, shard), ..StoreNeed::default() }
        }
        TierKind::Nvme => {
            StoreNeed { disk: nvme::shard_space(spec, layout, shard, spills), ..StoreNeed::default() }
        }
    }
}

fn state(spec: &JobSpec, layout: &Layout, shard: ShardId) -> u64 {
    Shape::of_shard(spec, layout, shard).bytes(layout.shard_len(shard) as usize) as u64
}

/// Returns the part of a need that a job's tier keeps in files.
pub fn space(spec: &JobSpec, need: &Need) -> u64 {
    match spec.tier {
        TierKind::Memory => 0,
        TierKind::Shm => need.total() - need.transfers,
        TierKind::Nvme => need.disk,
    }
}

/// Returns the free bytes of the file systems on which a job's tier keeps files. State directories count together.
pub fn free_space(spec: &JobSpec, storage: &Storage) -> u64 {
    let folders = match spec.properties().lifetime {
        Lifetime::Process => return u64::MAX,
        Lifetime::Host => storage.shm_dir.as_slice(),
        Lifetime::Drive => &storage.dirs,
    };
    let free = |dir: &PathBuf| statvfs(dir).map_or(0, |found| found.f_bavail.saturating_mul(found.f_frsize));
    folders.iter().map(free).fold(0, u64::saturating_add)
}

/// Format of a server's store of a job, as far as [`places`](super::places) depend on it.
pub(crate) fn format(
    spec: &JobSpec,
    placement: &Placement,
    server: ServerId,
    storage: &Storage,
) -> Result<u32, Fault> {
    match spec.tier {
        TierKind::Shm => shm::format(spec, placement, server, storage),
        TierKind::Memory | TierKind::Nvme => Ok(ALL_PLACES),
    }
}

/// Returns true if a job's tier allocates the memory of the job's buffers, and keeps it.
pub fn keeps_buffers(spec: &JobSpec) -> bool {
    match spec.tier {
        TierKind::Shm => true,
        TierKind::Memory | TierKind::Nvme => false,
    }
}

impl Storage {
    /// Returns true if this job's images live on the drives alone, and its gradients live there too.
    pub fn spills(&self, spec: &JobSpec) -> bool {
        match spec.tier {
            TierKind::Nvme => self.spill == Spill::All,
            TierKind::Memory | TierKind::Shm => false,
        }
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
        TierKind::Memory => memory::open(inputs, pool),
        TierKind::Shm => shm::open(inputs, buffers, pool),
        TierKind::Nvme => nvme::open(inputs, notify),
    }
}

/// Reads and verifies a tier's files in a folder that no server uses.
pub(super) fn inspect(folder: &Folder, header: Header, buffers: KeptBuffers) -> Result<Report, Fault> {
    match header.tier {
        TierKind::Nvme => nvme::inspect(folder, header),
        TierKind::Shm => shm::inspect(folder, header, buffers),
        TierKind::Memory => Err(corrupt(
            format!("{} (tier {})", folder.path.display(), header.tier),
            format!("tier {}", TierKind::names(|tier| tier.properties().survives_restart())),
            "the header is not one that a server wrote: restore a checkpoint",
        )),
    }
}
