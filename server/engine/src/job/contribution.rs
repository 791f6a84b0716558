//! One rank's gradient of a shard: copied into the job's memory, or lent where its sender has it.

use std::sync::Arc;

use longshore_proto::Dtype;

use crate::{kernels::Gradient, memory::Region};

/// Where vector loads do not cross cache lines.
pub(super) const LENT_ALIGNMENT: usize = 64;

/// Memory of a sender. It gave its word to leave it as it is until the step's update is done. One that breaks it spoils
/// its own job's weights, as it could with any gradient: nobody here relies on two reads giving the same.
pub trait Lent: Send + Sync {
    fn bytes(&self) -> &[u8];
}

/// In the wire's format.
pub(super) struct Contribution {
    region: Region,
    lent: Option<Arc<dyn Lent>>,
}

impl Contribution {
    pub(super) fn new(region: Region) -> Contribution {
        Contribution { region, lent: None }
    }

    /// Memory of the job to copy into, instead of what was lent.
    pub(super) fn own(&mut self) -> &mut [u8] {
        self.lent = None;
        self.region.bytes_mut()
    }

    pub(super) fn lend(&mut self, lent: Arc<dyn Lent>) {
        self.lent = Some(lent);
    }

    /// It was summed or updated with, or is not wanted: its sender's memory is let go.
    pub(super) fn give_back(&mut self) {
        self.lent = None;
    }

    pub(super) fn gradient(&self, dtype: Dtype) -> Gradient<'_> {
        let bytes = self.lent.as_ref().map_or_else(|| self.region.bytes(), |lent| lent.bytes());
        match dtype {
            Dtype::F32 => Gradient::F32(bytemuck::cast_slice(bytes)),
            Dtype::F16 => Gradient::F16(bytemuck::cast_slice(bytes)),
            Dtype::Bf16 => Gradient::Bf16(bytemuck::cast_slice(bytes)),
        }
    }
}
