//! Exports: the weights of one version in the format that a reader wants, copied while training goes on.

use std::sync::Arc;

use longshore_proto::{Dtype, Fault, Version};

use super::{
    super::{Job, compute::BLOCK},
    Captured, Snapshot,
    purpose::Purpose,
};
use crate::kernels::{ImageMut, cast};

impl Job {
    /// Asks for the master weights of every owned shard at a version, rounded to `dtype`, little-endian. Shards come in
    /// any order. The version may be one to come; None means the current one.
    pub fn begin_export(self: &Arc<Self>, version: Option<Version>, dtype: Dtype) -> Result<Snapshot, Fault> {
        let isa = self.compute().isa();
        let copy = move |captured: &Captured<'_>, block: usize, place: &mut [u8]| {
            captured.state.with_master(isa, block, |master| match dtype {
                Dtype::F32 => cast(isa, master, ImageMut::F32(bytemuck::cast_slice_mut(place))),
                Dtype::F16 => cast(isa, master, ImageMut::F16(bytemuck::cast_slice_mut(place))),
                Dtype::Bf16 => cast(isa, master, ImageMut::Bf16(bytemuck::cast_slice_mut(place))),
            });
        };
        self.begin_snapshot(version, Purpose::Export, BLOCK * dtype.bytes() as usize, Box::new(copy))
    }
}
