//! Exports: one version's weights in the format that a reader wants, or all of its state, copied during
//! training.

use std::sync::Arc;

use longshore_proto::{Dtype, Fault, StateArray, Version};

use super::{
    super::{Job, compute::BLOCK},
    Captured, Snapshot,
    purpose::Purpose,
};
use crate::kernels::{ImageMut, cast};

/// Contents of an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exported {
    /// The master weights, rounded to this format.
    Weights(Dtype),
    /// Every array that the rule has, in fp32.
    State,
}

impl Exported {
    /// The elements' format.
    pub fn dtype(self) -> Dtype {
        match self {
            Exported::Weights(dtype) => dtype,
            Exported::State => Dtype::F32,
        }
    }

    /// The arrays of which a block's copy consists, one after the other. A frozen shard has only the first of them.
    pub fn arrays(self, job: &Job) -> &'static [StateArray] {
        match self {
            Exported::Weights(_) => &[StateArray::Master],
            Exported::State => StateArray::of(job.spec.rule),
        }
    }
}

impl Job {
    /// Begins an export of every owned shard at a version, little-endian. Shards come in any order. The
    /// version may be a future one; None means the current one.
    pub fn begin_export(
        self: &Arc<Self>,
        version: Option<Version>,
        exported: Exported,
    ) -> Result<Snapshot, Fault> {
        let (isa, rule) = (self.compute().isa(), self.spec.rule);
        let (arrays, dtype) = (exported.arrays(self), exported.dtype());
        let array_bytes = BLOCK * dtype.bytes() as usize;
        let copy = move |captured: &Captured<'_>, block: usize, place: &mut [u8]| {
            let has = |array: &StateArray| array.index() == 0 || !captured.state.is_frozen();
            let arrays = arrays.iter().filter(|array| has(array));
            for (&array, place) in arrays.zip(place.chunks_exact_mut(array_bytes)) {
                captured.state.with_array(isa, rule, array, block, |values| match dtype {
                    Dtype::F32 => cast(isa, values, ImageMut::F32(bytemuck::cast_slice_mut(place))),
                    Dtype::F16 => cast(isa, values, ImageMut::F16(bytemuck::cast_slice_mut(place))),
                    Dtype::Bf16 => cast(isa, values, ImageMut::Bf16(bytemuck::cast_slice_mut(place))),
                });
            }
        };
        self.begin_snapshot(version, Purpose::Export, arrays.len() * array_bytes, Box::new(copy))
    }
}
