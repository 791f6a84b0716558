//! The bytes that an update moves through a server's memory.

use longshore_engine::kernels::bytes_per_parameter;
use longshore_proto::{Dtype, Formats, JobSpec};

/// For each element of a job. `sliced` says that each has one contributor, whatever the number of ranks.
pub(crate) fn update_bytes(spec: &JobSpec, sliced: bool) -> f64 {
    // Sums are fp32.
    let sums = (spec.world_size > 1 && !sliced) || spec.micro_steps > 1;
    let gradient = if sums { Dtype::F32.bytes() } else { spec.gradient_dtype.bytes() };
    let Formats { master, state, .. } = spec.formats;
    bytes_per_parameter(spec.rule, master, state, gradient as usize, spec.image_dtype.bytes() as usize)
}
