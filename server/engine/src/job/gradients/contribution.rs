//! Contribution of a rank to a shard: copied into the job's memory, lent by its sender, or on the drives.

use std::{ops::Range, sync::Arc};

use longshore_proto::Dtype;

use super::super::compute::BLOCK;
use crate::{
    kernels::{Gradient, Isa, Statistics, accumulate, accumulate_statistics, statistics, widen},
    memory::{AllocationError, Region, Source},
};

/// The alignment at which vector loads do not cross cache lines.
pub(in crate::job) const LENT_ALIGNMENT: usize = 64;

/// Memory of a sender, unchanged until the step's update is done. A sender that changes it spoils only its own job's
/// weights, as any wrong gradient would. No code relies on reading the same value twice.
pub trait Lent: Send + Sync {
    fn bytes(&self) -> Source<'_, u8>;
}

/// Gradient of a shard from one rank for one micro-step, in the wire's format.
pub(in crate::job) struct Contribution {
    region: Region,
    lent: Option<Arc<dyn Lent>>,
    /// Statistics of copied blocks, taken during the copy. A block being copied still has an earlier step's statistics,
    /// so they count only once the contribution is complete.
    statistics: Vec<Option<Statistics>>,
    /// The checksums of the chunks that went to the drives.
    sums: Vec<u32>,
    /// The parameters without a gradient that begin in a chunk, for each chunk on the drives.
    left_out: Vec<Vec<u32>>,
}

impl Contribution {
    pub(in crate::job) fn new(region: Region) -> Contribution {
        Contribution { region, lent: None, statistics: Vec::new(), sums: Vec::new(), left_out: Vec::new() }
    }

    /// Reserves the space of the job's own memory in a file that outlives the process.
    pub(super) fn reserve(&self) -> Result<(), AllocationError> {
        self.region.reserve()
    }

    /// Frees the job's own memory until something is copied into it.
    pub(super) fn release(&mut self) {
        self.lent = None;
        if let Err(error) = self.region.give_back() {
            tracing::debug!(%error, "memory of a contribution stays");
        }
    }

    /// Releases borrowed memory, and returns the job's own memory to copy into.
    pub(in crate::job) fn own(&mut self) -> &mut [u8] {
        self.lent = None;
        self.region.bytes_mut()
    }

    /// Takes the statistics of the blocks that end in `copied`, whose bytes are still in cache. A later pass over the
    /// gradient would take a tenth of the time in which it is received over loopback.
    pub(in crate::job) fn take_statistics(&mut self, copied: Range<usize>, dtype: Dtype, isa: Isa) {
        let blocks = self.region.bytes().len() / (BLOCK * dtype.bytes() as usize);
        self.statistics.resize(blocks, None);
        for (block, statistics) in statistics_within(self.region.bytes(), copied, dtype, isa) {
            self.statistics[block] = Some(statistics);
        }
    }

    /// Notes that a chunk is on the drives, and releases borrowed memory.
    pub(super) fn arrived(
        &mut self,
        chunk: usize,
        crc32: u32,
        statistics: &[(usize, Statistics)],
        left_out: Vec<u32>,
    ) {
        self.lent = None;
        self.left_out.resize(self.left_out.len().max(chunk + 1), Vec::new());
        self.left_out[chunk] = left_out;
        self.sums.resize(self.sums.len().max(chunk + 1), 0);
        self.sums[chunk] = crc32;
        for &(block, statistics) in statistics {
            self.statistics.resize(self.statistics.len().max(block + 1), None);
            self.statistics[block] = Some(statistics);
        }
    }

    /// The CRC-32 of each chunk on the drives.
    pub(super) fn sums(&self) -> &[u32] {
        &self.sums
    }

    /// Returns the parameters without a gradient in the chunks on the drives.
    pub(super) fn left_out(&self) -> Vec<u32> {
        self.left_out.concat()
    }

    pub(super) fn is_lent(&self) -> bool {
        self.lent.is_some()
    }

    /// Returns the statistics of a block, if they were taken while the gradient arrived.
    pub(super) fn statistics(&self, block: usize) -> Option<Statistics> {
        if self.lent.is_some() { None } else { self.statistics.get(block).copied().flatten() }
    }

    pub(in crate::job) fn lend(&mut self, lent: Arc<dyn Lent>) {
        self.lent = Some(lent);
    }

    /// Copies a lent gradient, for a job that cannot use it where it lies.
    pub(in crate::job) fn copy(&mut self, lent: &dyn Lent) {
        self.statistics.clear();
        lent.bytes().copy_to(self.own());
    }

    /// Releases the sender's memory.
    pub(super) fn give_back(&mut self) {
        self.lent = None;
    }

    pub(in crate::job) fn gradient(&self, dtype: Dtype) -> Gradient<'_> {
        cast(self.lent.as_ref().map_or_else(|| self.region.bytes().into(), |lent| lent.bytes()), dtype)
    }
}

/// The statistics of the blocks of `bytes` that end in `copied`, each with the block's index.
pub(in crate::job) fn statistics_within(
    bytes: &[u8],
    copied: Range<usize>,
    dtype: Dtype,
    isa: Isa,
) -> impl Iterator<Item = (usize, Statistics)> {
    let size = BLOCK * dtype.bytes() as usize;
    (copied.start / size..copied.end / size).map(move |block| {
        (block, statistics(isa, cast(bytes[block * size..(block + 1) * size].into(), dtype)))
    })
}

/// Adds one gradient of a block to the block's sum. The `first` gradient replaces the sum, and is never the last.
/// Returns the statistics of the new sum if `checked`.
pub(super) fn add(isa: Isa, part: Gradient<'_>, sum: &mut [f32], first: bool, checked: bool) -> Statistics {
    match (first, checked) {
        (true, _) => widen(isa, part, sum),
        (false, true) => return accumulate_statistics(isa, part, sum),
        (false, false) => accumulate(isa, part, sum),
    }
    Statistics::NONE
}

/// The wire's bytes as elements.
pub(in crate::job) fn cast(bytes: Source<'_, u8>, dtype: Dtype) -> Gradient<'_> {
    match dtype {
        Dtype::F32 => Gradient::F32(bytes.cast()),
        Dtype::F16 => Gradient::F16(bytes.cast()),
        Dtype::Bf16 => Gradient::Bf16(bytes.cast()),
    }
}
