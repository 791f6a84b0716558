//! Bytes that a step moves through a server's memory, and to and from its drives.

use longshore_engine::{
    admission::Need,
    kernels::bytes_per_parameter,
    tier::{Spill, Storage},
};
use longshore_proto::{Dtype, Formats, JobSpec, Layout, Lifetime, ShardId};

/// Returns the bytes of memory traffic of an update per element. `sliced` says that each element has one
/// contributor, whatever the number of ranks.
pub(crate) fn update_bytes(spec: &JobSpec, sliced: bool) -> f64 {
    // Sums are fp32.
    let sums = (spec.world_size > 1 && !sliced) || spec.micro_steps > 1;
    let gradient = if sums { Dtype::F32.bytes() } else { spec.gradient_dtype.bytes() };
    let Formats { master, state, .. } = spec.formats;
    bytes_per_parameter(spec.rule, master, state, gradient as usize, spec.image_dtype.bytes() as usize)
}

/// Traffic of a step with drives, in bytes per element that is updated or pulled.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct DriveTraffic {
    /// Reads and writes of an update: state, gradients in, images out.
    pub(crate) update: f64,
    /// Writes of gradients as they arrive.
    pub(crate) gradients: f64,
    /// Reads of a pull of trained weights. Weights pulled right after their update are still in DRAM, and cost no
    /// read.
    pub(crate) pull: f64,
    /// Reads of a pull of frozen weights.
    pub(crate) frozen_pull: f64,
}

impl DriveTraffic {
    /// Returns the traffic of a server that owns the shards `owned`. Numbers of written bytes come from the servers'
    /// own arithmetic.
    pub(crate) fn of(spec: &JobSpec, layout: &Layout, owned: &[ShardId], storage: &Storage) -> DriveTraffic {
        let trained = owned.iter().filter(|&&shard| !layout.is_frozen(shard));
        let trained = trained.map(|&shard| layout.shard_len(shard)).sum::<u64>() as f64;
        let elements = trained.max(1.0);
        let written = |spill| {
            let storage = Storage { spill, ..storage.clone() };
            Need::of(spec, layout, owned, &storage).written as f64 / elements
        };
        let all = written(storage.spill);
        let image = spec.image_dtype.bytes() as f64;
        // The images of a delayed job are written whatever spills.
        let spilled = storage.spills(spec) && spec.max_delay == 0;
        let images = if spilled { image * trained / elements } else { 0.0 };
        let gradients = all - written(Spill::State) - images;
        DriveTraffic {
            // State and gradients are read as often as they are written. Images are read only at a pull.
            update: 2.0 * all - gradients - images,
            gradients,
            pull: if storage.spills(spec) { image } else { 0.0 },
            // Frozen weights have one place, on the drives under any spill.
            frozen_pull: if spec.properties().lifetime == Lifetime::Drive { image } else { 0.0 },
        }
    }
}

#[cfg(test)]
mod tests {
    use longshore_proto::{Placement, ServerId, TierKind};

    use super::*;
    use crate::bench::{job, param};

    #[test]
    fn an_update_reads_state_and_gradients_and_no_images() {
        let spec = JobSpec { tier: TierKind::Nvme, ..job("plan", vec![param("all", 1 << 26)]).unwrap() };
        let layout = spec.validate().unwrap();
        let owned = Placement::striped(vec!["0".into()], layout.shards()).owned(ServerId(0));
        for (spill, max_delay, update, gradients, pull) in [
            (Spill::State, 0, 24.0, 0.0, 0.0),
            (Spill::All, 0, 28.0, 2.0, 2.0),
            (Spill::State, 1, 28.0, 0.0, 0.0),
            (Spill::All, 1, 30.0, 2.0, 2.0),
        ] {
            let spec = JobSpec { max_delay, ..spec.clone() };
            let storage = Storage { dirs: vec!["0".into()], spill, ..Storage::default() };
            let found = DriveTraffic::of(&spec, &layout, &owned, &storage);
            // Checksums and whole pages come on top.
            assert!((found.update / update - 1.0).abs() < 0.002, "{spill:?}: {found:?}");
            assert!((found.gradients - gradients).abs() < 0.01, "{spill:?}: {found:?}");
            assert_eq!((found.pull, found.frozen_pull), (pull, 2.0), "{spill:?}");
        }
    }
}
