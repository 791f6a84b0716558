//! Assembles the gradients of one micro-step, put in any order, into chunks. A complete chunk leaves at once. Called
//! on the trainer's threads.

use std::{
    collections::{HashMap, hash_map::Entry},
    ops::Range,
    sync::{Arc, Mutex},
};

use longshore_proto::{
    ChunkId, JobSpec, Layout, MicroStep, Param, Rank, ShardId, Step, checksum::crc32, limits::CHUNK_BYTES,
};

use tracing::debug_span;

use super::{Accumulator, ChunkKey, Gradients, Payload, Way, Write, nothing, outbox::Outbox};
use crate::{
    convert,
    device::{BufferPool, PooledBuffer},
    error::{GradientError, Misuse, Result},
    lock,
    pull::Feed,
};

/// The layout of chunks, and the pool of their buffers, which all micro-steps share.
pub(crate) struct ChunkSource<'a> {
    pub(crate) spec: &'a JobSpec,
    pub(crate) layout: &'a Layout,
    pub(crate) pool: &'a BufferPool,
}

/// Bytes of a device's copies that are enqueued together, and awaited once. Lanes send these bytes while the device
/// copies the next ones. A PCIe 5 link takes 1.2 ms for so many bytes. Each wait left the link idle for 0.13 ms on an
/// H200's host.
const TOGETHER_BYTES: usize = 64 * 1024 * 1024;

/// A part of a parameter in one chunk: its shard, its first element in the shard, and its elements in the parameter.
struct Part {
    shard: ShardId,
    offset: u64,
    range: Range<usize>,
}

/// Memory for a part of a gradient.
#[derive(Debug)]
pub struct Slot {
    /// Index of the gradient in the caller's list.
    pub gradient: usize,
    /// Elements of the gradient that belong here.
    pub range: Range<usize>,
    /// Address of the memory for these elements, in the job's gradient type.
    pub address: usize,
}

/// A chunk being filled.
struct Open {
    buffer: PooledBuffer,
    /// Number of parameter elements that are not put yet.
    missing: u64,
}

/// Collects one micro-step of the partitions that this rank contributes to. A chunk is complete when all its
/// parameter elements have been put. Padding is zero.
pub(crate) struct Collector {
    pub(crate) step: Step,
    pub(crate) micro_step: MicroStep,
    open: HashMap<(ShardId, ChunkId), Open>,
    rank: Rank,
    /// For each parameter, true until its gradient is put. None if the rank does not contribute to it.
    awaited: Vec<Option<bool>>,
    left: usize,
    /// For each shard, the way of its gradient to the server: in chunks or lent.
    ways: Vec<Way>,
}

impl Collector {
    pub(crate) fn new(
        (step, micro_step): (Step, MicroStep),
        rank: Rank,
        (spec, layout): (&JobSpec, &Layout),
        ways: Vec<Way>,
    ) -> Collector {
        let contributes = |param: usize| layout.param_contributors(param).binary_search(&rank).is_ok();
        let awaited: Vec<_> =
            (0..spec.params.len()).map(|param| contributes(param).then_some(true)).collect();
        let left = awaited.iter().flatten().count();
        Collector { step, micro_step, open: HashMap::new(), rank, awaited, left, ways }
    }

    /// Puts the gradient of a parameter with `elements` elements, which `write` fills in. Complete chunks go to
    /// `outbox`.
    ///
    /// # Errors
    /// Errors of `write` and of `outbox`; `Gradient`, and then nothing was put.
    pub(crate) fn put(
        &mut self,
        plan: &ChunkSource<'_>,
        param: usize,
        elements: u64,
        write: &mut Write<'_>,
        mut outbox: impl FnMut(ChunkKey, Payload, u32) -> Result<()>,
    ) -> Result<()> {
        self.accept(plan, param, elements)?;
        for part in self.parts(plan, param) {
            write(part.range.clone(), self.memory(plan, &part)?)?;
            self.filled(plan, &part, &mut outbox)?;
        }
        Ok(())
    }

    /// Puts gradients that `write` copies together. Each call of `write` gets parts of up to `TOGETHER_BYTES`, with
    /// their memory.
    ///
    /// # Errors
    /// As for [`Collector::put`].
    pub(crate) fn put_together(
        &mut self,
        plan: &ChunkSource<'_>,
        gradients: &[(usize, u64)],
        write: &mut dyn FnMut(&[Slot]) -> Result<()>,
        mut outbox: impl FnMut(ChunkKey, Payload, u32) -> Result<()>,
    ) -> Result<()> {
        for (at, &(param, elements)) in gradients.iter().enumerate() {
            if let Err(error) = self.accept(plan, param, elements) {
                gradients[..at].iter().for_each(|&(param, _)| self.awaited[param] = Some(true));
                self.left += at;
                return Err(error.into());
            }
        }
        let dtype = plan.spec.gradient_dtype;
        let (mut parts, mut slots, mut bytes) = (Vec::new(), Vec::new(), 0);
        let mut left = gradients.iter().enumerate().peekable();
        while let Some((gradient, &(param, _))) = left.next() {
            let mut of_param = self.parts(plan, param).into_iter().peekable();
            while let Some(part) = of_param.next() {
                let memory = self.memory(plan, &part)?;
                bytes += memory.len();
                let address = memory.as_mut_ptr().expose_provenance();
                slots.push(Slot { gradient, range: part.range.clone(), address });
                parts.push(part);
                if bytes < TOGETHER_BYTES && (of_param.peek().is_some() || left.peek().is_some()) {
                    continue;
                }
                write(&slots)?;
                for part in parts.drain(..) {
                    if plan.spec.leave_out && part.range.start == 0 {
                        nothing::deny(dtype, self.memory(plan, &part)?);
                    }
                    self.filled(plan, &part, &mut outbox)?;
                }
                slots.clear();
                bytes = 0;
            }
        }
        Ok(())
    }

    /// Returns the parts of a parameter, each in one chunk.
    fn parts(&self, plan: &ChunkSource<'_>, param: usize) -> Vec<Part> {
        let (mut parts, mut done) = (Vec::new(), 0);
        for slice in plan.layout.slices(plan.layout.param_range(param)) {
            let (mut offset, end) = (slice.offset, slice.offset + slice.elements);
            let unit = self.unit(plan, slice.shard);
            while offset < end {
                let until = end.min((offset / unit + 1) * unit);
                let range = done..done + (until - offset) as usize;
                done = range.end;
                parts.push(Part { shard: slice.shard, offset, range });
                offset = until;
            }
        }
        parts
    }

    /// Notes that a parameter is put. Each is put once.
    fn accept(&mut self, plan: &ChunkSource<'_>, param: usize, elements: u64) -> Result<(), GradientError> {
        self.check(plan, param, elements)?;
        self.awaited[param] = Some(false);
        self.left -= 1;
        Ok(())
    }

    /// Returns the number of elements of a shard that leave together.
    fn unit(&self, plan: &ChunkSource<'_>, shard: ShardId) -> u64 {
        match self.ways[shard.index()] {
            Way::Chunks => CHUNK_BYTES as u64 / plan.spec.gradient_dtype.bytes(),
            Way::Lent => plan.layout.shard_len(shard),
        }
    }

    fn check(&self, plan: &ChunkSource<'_>, param: usize, given: u64) -> Result<(), GradientError> {
        let Some(described) = plan.spec.params.get(param) else {
            return Err(GradientError::Unknown { param, params: plan.spec.params.len() });
        };
        let range = plan.layout.param_range(param);
        let expected = range.end - range.start;
        let name = || described.name.clone();
        if given != expected {
            return Err(GradientError::Length { name: name(), given, expected });
        }
        match self.awaited[param] {
            Some(true) => Ok(()),
            Some(false) => Err(GradientError::Twice { name: name() }),
            None if plan.layout.is_param_frozen(param) => {
                Err(GradientError::Frozen { name: name(), rank: self.rank.0 })
            }
            None => Err(GradientError::NotContributor { name: name(), rank: self.rank.0 }),
        }
    }

    /// Returns the memory of a part, in a chunk that is begun if needed.
    fn memory(&mut self, plan: &ChunkSource<'_>, part: &Part) -> Result<&mut [u8]> {
        let (unit, width) = (self.unit(plan, part.shard), plan.spec.gradient_dtype.bytes());
        let chunk = ChunkId((part.offset / unit) as u32);
        let open = match self.open.entry((part.shard, chunk)) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => entry.insert(begin(plan, part.shard, chunk, unit)?),
        };
        let start = ((part.offset % unit) * width) as usize;
        Ok(&mut open.buffer.as_mut()[start..start + part.range.len() * width as usize])
    }

    /// Notes that a part was written. Its chunk leaves once it is complete.
    fn filled(
        &mut self,
        plan: &ChunkSource<'_>,
        part: &Part,
        mut outbox: impl FnMut(ChunkKey, Payload, u32) -> Result<()>,
    ) -> Result<()> {
        let (shard, chunk) = (part.shard, ChunkId((part.offset / self.unit(plan, part.shard)) as u32));
        let Entry::Occupied(mut open) = self.open.entry((shard, chunk)) else { return Ok(()) };
        open.get_mut().missing -= part.range.len() as u64;
        if open.get().missing > 0 {
            return Ok(());
        }
        let key = ChunkKey { step: self.step, micro_step: self.micro_step, shard, chunk };
        let buffer = open.remove().buffer;
        match self.ways[shard.index()] {
            Way::Lent => outbox(key, Payload::lent(buffer), 0),
            Way::Chunks => {
                let payload = Payload::from(buffer);
                let crc = crc32(&payload.bytes);
                outbox(key, payload, crc)
            }
        }
    }

    /// Fails unless every parameter of the rank's partitions was put. On success every chunk has left. Padding is
    /// shorter than a chunk, so each chunk holds an element of some parameter.
    pub(crate) fn finish(&self, spec: &JobSpec) -> Result<(), GradientError> {
        match self.awaited.iter().position(|&awaited| awaited == Some(true)) {
            Some(first) => {
                Err(GradientError::Missing { name: spec.params[first].name.clone(), missing: self.left })
            }
            None => Ok(()),
        }
    }
}

fn begin(plan: &ChunkSource<'_>, shard: ShardId, chunk: ChunkId, unit: u64) -> Result<Open> {
    let whole = plan.layout.shard_range(shard);
    let start = whole.start + u64::from(chunk.0) * unit;
    let end = whole.end.min(start + unit);
    let (mut missing, width) = (end - start, plan.spec.gradient_dtype.bytes());
    let mut buffer = plan.pool.take((missing * width) as usize)?;
    // Only padding is zeroed. Zeroing the whole chunk would cost as much as copying the gradient.
    for padding in plan.layout.padding(start..end) {
        missing -= padding.end - padding.start;
        let (from, until) = ((padding.start - start) * width, (padding.end - start) * width);
        buffer.as_mut()[from as usize..until as usize].fill(0);
    }
    Ok(Open { buffer, missing })
}

/// Takes the gradient of one (step, micro-step), and sends it to the shards' owners.
#[must_use = "call `finish` after the last `put`"]
pub struct Assembler {
    pub(crate) collector: Collector,
    pub(crate) outbox: Outbox,
    /// The weights that backward computes with, until all of them have arrived.
    pub(crate) feed: Option<Feed>,
    pub(crate) sums: Option<Sums>,
}

/// Data of a micro-step on a worker that adds micro-steps up. Its gradient is added to the sums; the last micro-step
/// sends the mean.
pub(crate) struct Sums {
    pub(crate) accumulator: Arc<Mutex<Accumulator>>,
    pub(crate) micro_step: u32,
}

impl Assembler {
    /// Takes lent gradients back once all weights of this feed have arrived. Servers then read no gradients up to the
    /// step that made the feed's weights. Usually all weights are there at the first `put`, whose gradient then reuses
    /// the memory of the lent ones.
    fn take_back(&mut self) {
        let gradients = self.outbox.gradients();
        let all = 0..gradients.cluster.layout.elements();
        if let Some(feed) = self.feed.take_if(|feed| feed.is_ready(all)) {
            gradients.retained.updated(Step(feed.version().0));
        }
    }

    /// Takes the gradient of parameter `param`, already multiplied by the step's loss scale. Parameters come in
    /// any order, each once. Blocks while the connections are behind.
    ///
    /// # Errors
    /// - `Gradient` for a wrong length, a second put or an unknown parameter.
    /// - `Shortage` if the host budget is used up.
    /// - The session's failure, if there is one.
    pub fn put(&mut self, param: usize, gradient: &[f32]) -> Result<()> {
        let dtype = self.outbox.gradients().cluster.spec().gradient_dtype;
        self.put_with(param, gradient.len() as u64, &mut |range, target| {
            convert::from_f32(dtype, &gradient[range], target);
        })
    }

    /// Takes a gradient as [`Assembler::put`] does, but `write` fills the memory that is sent, as a device's copy can.
    /// `write` gets a range of the `elements` and their memory, in the job's gradient type. Memory that `write` skips
    /// keeps old bytes.
    ///
    /// # Errors
    /// Errors of [`Assembler::put`].
    pub fn put_with(
        &mut self,
        param: usize,
        elements: u64,
        write: &mut dyn FnMut(Range<usize>, &mut [u8]),
    ) -> Result<()> {
        let JobSpec { gradient_dtype: dtype, leave_out, .. } = *self.outbox.gradients().cluster.spec();
        self.put_bytes(param, elements, &mut |range: Range<usize>, target: &mut [u8]| {
            let begins = range.start == 0;
            write(range, target);
            if leave_out && begins {
                nothing::deny(dtype, target);
            }
            Ok(())
        })
    }

    /// Takes gradients that a device copies together. `gradients` has parameters and their numbers of elements.
    /// `write` fills some slots at a time, and may fail; the micro-step cannot go on then.
    ///
    /// # Errors
    /// Errors of `write`, and of [`Assembler::put`]; `Misuse` if this worker adds micro-steps up.
    pub fn put_together(
        &mut self,
        gradients: &[(usize, u64)],
        write: &mut dyn FnMut(&[Slot]) -> Result<()>,
    ) -> Result<()> {
        let _stage = debug_span!(target: "stage", "push", gradients = gradients.len()).entered();
        self.outbox.check()?;
        self.take_back();
        if self.sums.is_some() {
            return Err(Misuse("gradients that the worker adds up are put one by one").into());
        }
        let Assembler { collector, outbox, .. } = self;
        let Gradients { cluster, pool, .. } = outbox.gradients();
        let plan = ChunkSource { spec: cluster.spec(), layout: &cluster.layout, pool };
        collector.put_together(&plan, gradients, write, |key, payload, crc| outbox.send(key, payload, crc))
    }

    /// Notes that parameter `param` got no gradient in this micro-step. A job with `leave_out` leaves out a parameter
    /// for which no rank has a gradient in the step. Any other job counts zeros.
    ///
    /// # Errors
    /// Errors of [`Assembler::put`].
    pub fn put_nothing(&mut self, param: usize) -> Result<()> {
        let cluster = &self.outbox.gradients().cluster;
        let JobSpec { gradient_dtype: dtype, leave_out, .. } = *cluster.spec();
        let elements = cluster.spec().params.get(param).and_then(Param::elements).unwrap_or(0);
        self.put_bytes(param, elements, &mut |_, target: &mut [u8]| {
            match leave_out {
                true => nothing::fill(dtype, target),
                false => target.fill(0),
            }
            Ok(())
        })
    }

    fn put_bytes(&mut self, param: usize, elements: u64, write: &mut Write<'_>) -> Result<()> {
        let _stage = debug_span!(target: "stage", "push", param).entered();
        self.outbox.check()?;
        self.take_back();
        let Assembler { collector, outbox, sums, .. } = self;
        let Gradients { cluster, pool, .. } = outbox.gradients();
        let plan = ChunkSource { spec: cluster.spec(), layout: &cluster.layout, pool };
        let send = |key, payload, crc| outbox.send(key, payload, crc);
        let Some(Sums { accumulator, micro_step }) = sums else {
            return collector.put(&plan, param, elements, write, send);
        };
        collector.check(&plan, param, elements)?;
        let (dtype, place) = (plan.spec.gradient_dtype, plan.layout.param_range(param));
        let mut sums = lock(accumulator);
        if sums.is_last(*micro_step) {
            let mut write = |range: Range<usize>, target: &mut [u8]| {
                let begins = plan.spec.leave_out && range.start == 0;
                let first = place.start + range.start as u64;
                write(range, target)?;
                let nothing = begins && sums.is_nothing_at(first) && nothing::is_at(dtype, target);
                sums.finish(first, target);
                if begins && !nothing {
                    // A mean of gradients may be -0, which would read as no gradient.
                    nothing::deny(dtype, target);
                }
                Ok(())
            };
            return collector.put(&plan, param, elements, &mut write, send);
        }
        collector.accept(&plan, param, elements)?;
        sums.add(*micro_step, place, write)
    }

    /// Ends the micro-step.
    ///
    /// # Errors
    /// `Gradient` naming the first parameter without a gradient.
    pub fn finish(self) -> Result<()> {
        self.collector.finish(self.outbox.gradients().cluster.spec())?;
        self.outbox.finish();
        Ok(())
    }
}

#[cfg(test)]
#[path = "assembler_tests.rs"]
mod tests;
