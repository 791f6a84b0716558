//! Contributions: bytes into their slot, then sums and figures.

use std::sync::atomic::Ordering;

use longshore_proto::{ContributionChunk, Fault, MicroStep, ShardId, Step};

use super::{
    Job,
    buffers::{ShardBuffers, gradient},
    compute::BLOCK,
};
use crate::{
    kernels::{Figures, Gradient, accumulate, accumulate_figures, figures, widen},
    lock,
    step::{Admission, Work},
};

/// What became of a pushed chunk.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Stored {
    New(Option<Work>),
    /// Held already, with the same checksum.
    Duplicate,
    /// Its buffer is not free yet; nothing was stored. Ask again after a change.
    Busy,
}

impl Job {
    /// Stores one chunk whose payload has been checked against its checksum.
    pub fn store(&self, chunk: &ContributionChunk, payload: &[u8]) -> Result<Stored, Fault> {
        self.check_alive()?;
        let admission = lock(&self.machine).admit(chunk)?;
        let ticket = match admission {
            Admission::Duplicate => return Ok(Stored::Duplicate),
            Admission::Busy => return Ok(Stored::Busy),
            Admission::Write(ticket) => ticket,
        };
        let contribution = chunk.contribution;
        let range = self.layout.chunk_bytes(contribution.shard, chunk.chunk, chunk.dtype);
        let buffers = &self.buffers.shards[ticket.owned].contributions[ticket.slot];
        let mut region = lock(&buffers[contribution.rank.index()]);
        let target =
            range.and_then(|range| region.bytes_mut().get_mut(range.start as usize..range.end as usize));
        let Some(target) = target.filter(|target| target.len() == payload.len()) else {
            drop(region);
            lock(&self.machine).abandoned(ticket);
            return Err(Fault::invalid(
                "payload",
                payload.len(),
                "as long as the chunk",
                "send whole chunks",
            ));
        };
        target.copy_from_slice(payload);
        drop(region);
        self.pushed_bytes.fetch_add(payload.len() as u64, Ordering::Relaxed);
        let work = lock(&self.machine).stored(ticket);
        self.notify();
        Ok(Stored::New(work))
    }

    /// Adds the ranks' buffers of a micro-step in rank order; takes the figures with the last addition.
    pub(super) fn sum(&self, owned: usize, slot: usize, step: Step, micro_step: MicroStep) {
        let buffers = &self.buffers.shards[owned];
        let last = micro_step.0 + 1 == self.spec.micro_steps;
        let figures = match &buffers.accumulators[slot] {
            None => self.lone_figures(buffers, slot),
            Some(accumulator) => {
                let mut accumulator = lock(accumulator);
                self.accumulate(buffers, slot, accumulator.f32_mut(), micro_step.0 == 0, last)
            }
        };
        if last {
            *lock(&buffers.figures[slot]) = figures;
        }
        let complete = lock(&self.machine).summed(owned, slot);
        tracing::trace!(job = %self.spec.name, %step, %micro_step, shard = %self.owned[owned], complete, "summed");
    }

    fn lone_figures(&self, buffers: &ShardBuffers, slot: usize) -> Vec<Figures> {
        let isa = self.compute.isa();
        let region = lock(&buffers.contributions[slot][0]);
        let whole = gradient(&region, self.spec.gradient_dtype);
        let blocks = (0..whole.len()).step_by(BLOCK).map(|start| whole.slice(start..start + BLOCK)).collect();
        self.compute.blocks(blocks, |block| figures(isa, block))
    }

    fn accumulate(
        &self,
        buffers: &ShardBuffers,
        slot: usize,
        accumulator: &mut [f32],
        first: bool,
        last: bool,
    ) -> Vec<Figures> {
        let isa = self.compute.isa();
        let regions: Vec<_> = buffers.contributions[slot].iter().map(lock).collect();
        let ranks: Vec<Gradient<'_>> =
            regions.iter().map(|region| gradient(region, self.spec.gradient_dtype)).collect();
        let blocks = accumulator.chunks_mut(BLOCK).enumerate().collect();
        self.compute.blocks(blocks, |(block, sum): (usize, &mut [f32])| {
            // All ranks of a block before the next block: the 256 KiB sum stays in cache.
            let range = block * BLOCK..block * BLOCK + sum.len();
            let mut taken = Figures { sum_squares: 0.0, first_nonfinite: None };
            for (rank, whole) in ranks.iter().enumerate() {
                let part = whole.slice(range.clone());
                match (first && rank == 0, last && rank + 1 == ranks.len()) {
                    (true, _) => widen(isa, part, sum),
                    (false, true) => taken = accumulate_figures(isa, part, sum),
                    (false, false) => accumulate(isa, part, sum),
                }
            }
            taken
        })
    }

    /// Figures of each block of a shard, once its gradient of a step is complete.
    pub fn figures(&self, shard: ShardId, step: Step) -> Result<Option<Vec<Figures>>, Fault> {
        self.check_alive()?;
        let machine = lock(&self.machine);
        let owned = machine.owned_index(shard)?;
        machine.check_stats(step)?;
        if !machine.is_complete(owned, step) {
            return Ok(None);
        }
        let slot = (step.0 % self.spec.gradient_slots() as u64) as usize;
        Ok(Some(lock(&self.buffers.shards[owned].figures[slot]).clone()))
    }
}
