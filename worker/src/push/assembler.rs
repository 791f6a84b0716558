//! Gradients of one micro-step, put in any order, cut into wire chunks that leave as soon as they are complete.

use std::collections::HashMap;

use longshore_proto::{
    ChunkId, Dtype, JobSpec, Layout, MicroStep, ShardId, Step, checksum::crc32, limits::CHUNK_BYTES,
};

use super::{ChunkKey, Payload, outbox::Outbox};
use crate::{
    convert,
    device::{Pool, PooledBuffer},
    error::{GradientError, Result},
};

/// What the chunks are cut from. Shared by all micro-steps.
pub(crate) struct Plan<'a> {
    pub(crate) spec: &'a JobSpec,
    pub(crate) layout: &'a Layout,
    pub(crate) pool: &'a Pool,
}

impl Plan<'_> {
    /// Parameter elements inside a chunk; the rest is padding.
    fn expected(&self, start: u64, end: u64) -> u64 {
        let params = self.spec.params.len();
        let mut param = first_at_or_after(self.layout, params, start);
        let mut expected = 0;
        while param < params {
            let range = self.layout.param_range(param);
            if range.start >= end {
                break;
            }
            expected += range.end.min(end) - range.start.max(start);
            param += 1;
        }
        expected
    }
}

/// The first parameter that ends after a flat element.
fn first_at_or_after(layout: &Layout, params: usize, element: u64) -> usize {
    let (mut low, mut high) = (0, params);
    while low < high {
        let middle = low.midpoint(high);
        if layout.param_range(middle).end <= element { low = middle + 1 } else { high = middle }
    }
    low
}

/// A chunk being filled.
struct Open {
    buffer: PooledBuffer,
    /// Parameter elements still to come.
    missing: u64,
}

/// Collects one micro-step. Chunks are complete when every parameter element in them has been put; padding is zero.
pub(crate) struct Collector {
    pub(crate) step: Step,
    pub(crate) micro_step: MicroStep,
    open: HashMap<(ShardId, ChunkId), Open>,
    put: Vec<bool>,
    left: usize,
}

impl Collector {
    pub(crate) fn new(step: Step, micro_step: MicroStep, params: usize) -> Collector {
        Collector { step, micro_step, open: HashMap::new(), put: vec![false; params], left: params }
    }

    /// Converts a parameter's gradient to the wire's type and hands complete chunks to `outbox`.
    pub(crate) fn put(
        &mut self,
        plan: &Plan<'_>,
        param: usize,
        gradient: &[f32],
        mut outbox: impl FnMut(ChunkKey, Payload, u32) -> Result<()>,
    ) -> Result<()> {
        self.check(plan, param, gradient.len() as u64)?;
        self.put[param] = true;
        self.left -= 1;
        let dtype = plan.spec.gradient_dtype;
        let mut rest = gradient;
        for slice in plan.layout.slices(plan.layout.param_range(param)) {
            let (mut offset, end) = (slice.offset, slice.offset + slice.elements);
            while offset < end {
                let until = end.min((offset / chunk_elements(dtype) + 1) * chunk_elements(dtype));
                let (source, after) = rest.split_at((until - offset) as usize);
                rest = after;
                if let Some((key, payload)) = self.fill(plan, slice.shard, offset, source)? {
                    let crc = crc32(&payload.bytes);
                    outbox(key, payload, crc)?;
                }
                offset = until;
            }
        }
        Ok(())
    }

    fn check(&self, plan: &Plan<'_>, param: usize, given: u64) -> Result<(), GradientError> {
        let Some(described) = plan.spec.params.get(param) else {
            return Err(GradientError::Unknown { param, params: plan.spec.params.len() });
        };
        let range = plan.layout.param_range(param);
        let expected = range.end - range.start;
        let name = || described.name.clone();
        if given != expected {
            return Err(GradientError::Length { name: name(), given, expected });
        }
        if self.put[param] {
            return Err(GradientError::Twice { name: name() });
        }
        Ok(())
    }

    /// Elements that lie in one chunk. The chunk comes back when it is complete.
    fn fill(
        &mut self,
        plan: &Plan<'_>,
        shard: ShardId,
        offset: u64,
        source: &[f32],
    ) -> Result<Option<(ChunkKey, Payload)>> {
        let dtype = plan.spec.gradient_dtype;
        let chunk = ChunkId((offset / chunk_elements(dtype)) as u32);
        let open = match self.open.entry((shard, chunk)) {
            std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
            std::collections::hash_map::Entry::Vacant(entry) => entry.insert(begin(plan, shard, chunk)?),
        };
        let start = ((offset % chunk_elements(dtype)) * dtype.bytes()) as usize;
        let bytes = source.len() * dtype.bytes() as usize;
        convert::from_f32(dtype, source, &mut open.buffer.as_mut()[start..start + bytes]);
        open.missing -= source.len() as u64;
        if open.missing > 0 {
            return Ok(None);
        }
        let key = ChunkKey { step: self.step, micro_step: self.micro_step, shard, chunk };
        let complete = self.open.remove(&(shard, chunk));
        Ok(complete.map(|open| (key, Payload::from(open.buffer))))
    }

    /// Errors unless every parameter was put. Every chunk holds a parameter's element, since gaps and tail are shorter
    /// than a block, so then every chunk has left.
    pub(crate) fn finish(&self, spec: &JobSpec) -> Result<(), GradientError> {
        match self.put.iter().position(|put| !put) {
            Some(first) => {
                Err(GradientError::Missing { name: spec.params[first].name.clone(), missing: self.left })
            }
            None => Ok(()),
        }
    }
}

fn chunk_elements(dtype: Dtype) -> u64 {
    CHUNK_BYTES as u64 / dtype.bytes()
}

fn begin(plan: &Plan<'_>, shard: ShardId, chunk: ChunkId) -> Result<Open> {
    let dtype = plan.spec.gradient_dtype;
    let bytes = plan.layout.chunk_bytes(shard, chunk, dtype).unwrap_or(0..0);
    let start = plan.layout.shard_range(shard).start + bytes.start / dtype.bytes();
    let elements = (bytes.end - bytes.start) / dtype.bytes();
    let missing = plan.expected(start, start + elements);
    let mut buffer = plan.pool.take((bytes.end - bytes.start) as usize)?;
    if missing < elements {
        buffer.as_mut().fill(0);
    }
    Ok(Open { buffer, missing })
}

/// The gradient of one (step, micro-step), on its way to the shards' owners.
#[must_use = "call `finish` after the last `put`"]
pub struct Assembler {
    collector: Collector,
    outbox: Outbox,
}

impl Assembler {
    pub(crate) fn new(collector: Collector, outbox: Outbox) -> Assembler {
        Assembler { collector, outbox }
    }

    /// The gradient of parameter `param`, already multiplied by the step's loss scale; in any order, each once. Blocks
    /// when the connections are behind.
    ///
    /// # Errors
    /// `Gradient` for a wrong length, a second put or an unknown parameter; `Shortage` when the host budget is used up;
    /// the session's failure, if there is one.
    pub fn put(&mut self, param: usize, gradient: &[f32]) -> Result<()> {
        self.outbox.check()?;
        let Assembler { collector, outbox } = self;
        let core = outbox.core();
        let plan = Plan { spec: core.spec(), layout: &core.layout, pool: &core.chunk_pool };
        collector.put(&plan, param, gradient, |key, payload, crc| outbox.send(key, payload, crc))
    }

    /// Ends the micro-step.
    ///
    /// # Errors
    /// `Gradient` naming the first parameter without a gradient.
    pub fn finish(self) -> Result<()> {
        self.collector.finish(self.outbox.core().spec())?;
        self.outbox.finish();
        Ok(())
    }
}

#[cfg(test)]
#[path = "assembler_tests.rs"]
mod tests;
