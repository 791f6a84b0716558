//! Sums of contributions, and the gradient statistics of a sum or of a lone contribution.

use std::collections::VecDeque;

use longshore_proto::{Fault, MicroStep, ShardId, Step};

use tracing::debug_span;

use super::{
    super::{Job, compute::BLOCK},
    Gradients,
    contribution::add,
};
use crate::{
    ids::{Contributor, GradientSlot, OwnedShard},
    kernels::{Gradient, Statistics, statistics},
    lock,
    step::{Sum, Work},
};

/// Most sums that are formed together. Formed one by one they lose a fifth of their time, while threads wait
/// for each other and wake others. The loss is 0.08 ms a shard, beside 0.28 ms of work for a lone gradient on
/// two cores.
const SUMS_AT_ONCE: usize = 8;

/// A block of a sum, and the whole gradients whose blocks are added to it.
struct Part<'a> {
    block: usize,
    sum: &'a mut [f32],
    ranks: &'a [Gradient<'a>],
    first: bool,
    checked: bool,
}

/// The first non-finite element of a shard, from its blocks' statistics.
fn first_nonfinite(statistics: &[Statistics]) -> Option<u64> {
    let element = |(block, statistics): (usize, &Statistics)| {
        Some(block as u64 * BLOCK as u64 + u64::from(statistics.first_nonfinite?))
    };
    statistics.iter().enumerate().find_map(element)
}

/// Takes the sums at the front of a queue, as many as are formed together.
pub(in crate::job) fn take_sums(works: &mut VecDeque<Work>) -> Vec<Sum> {
    let mut sums = Vec::new();
    while sums.len() < SUMS_AT_ONCE
        && let Some(&Work::Sum(sum)) = works.front()
    {
        works.pop_front();
        sums.push(sum);
    }
    sums
}

impl Job {
    /// Adds the ranks' contributions of a micro-step in rank order, and takes the statistics with the last addition.
    /// The machine asks for one sum of a shard's slot at a time.
    pub(in crate::job) fn sum(&self, sums: &[Sum]) -> Result<(), Fault> {
        let Some(first) = sums.first() else { return Ok(()) };
        let shard = self.owned[first.owned.index()].0;
        let _stage =
            debug_span!(target: "stage", "sum", shard, shards = sums.len(), step = first.step.0).entered();
        let statistics = self.gradients.form(sums, || self.notify_owed())?;
        for (&Sum { owned, slot, step, micro_step }, statistics) in sums.iter().zip(statistics) {
            let mut nonfinite = None;
            if self.gradients.is_last(micro_step) {
                nonfinite = first_nonfinite(&statistics);
                self.gradients.set_statistics(owned, slot, statistics);
                self.gradients.find_left_out(owned, slot);
                if let Some(kept) = &self.tier.kept {
                    // Version and loss scale of the step's other shards outlive the process too.
                    kept.settle(step, self.protocol.machine().computed_with(step));
                    kept.complete(owned, step);
                }
            }
            let complete = self.protocol.machine().summed(owned, slot, nonfinite);
            let shard = self.owned[owned.index()];
            tracing::trace!(job = %self.spec.name, %step, %micro_step, %shard, complete, "summed");
        }
        Ok(())
    }

    /// The statistics of each block of a shard, once its gradient of a step is complete and each rank's present process
    /// has sent its own. A frozen shard has none.
    pub fn statistics(&self, shard: ShardId, step: Step) -> Result<Option<Vec<Statistics>>, Fault> {
        self.check_alive()?;
        let machine = self.protocol.machine();
        let owned = machine.owned_index(shard)?;
        machine.check_stats(step)?;
        if !machine.is_complete(owned, step) || machine.owing(owned, step).is_some() {
            return Ok(None);
        }
        Ok(Some(self.gradients.statistics(owned, self.gradients.slot(step))))
    }
}

impl Gradients {
    /// Forms these sums, or only takes statistics if each is of a lone gradient. Returns the statistics of
    /// each sum's blocks. If the update threads take part, the calling thread runs `meanwhile` while they
    /// begin.
    fn form(&self, sums: &[Sum], meanwhile: impl FnOnce()) -> Result<Vec<Vec<Statistics>>, Fault> {
        let summed = sums.iter().filter(|sum| self.accumulates(sum.owned)).count();
        if summed == sums.len() {
            return self.form_sums(sums, meanwhile);
        }
        if summed == 0 {
            return Ok(self.lone_statistics(sums, meanwhile));
        }
        // Some of these shards are summed and some are not, so they belong to several partitions. Each is
        // formed alone.
        meanwhile();
        let mut formed = Vec::with_capacity(sums.len());
        for sum in sums.chunks(1) {
            formed.extend(match self.accumulates(sum[0].owned) {
                true => self.form_sums(sum, || ())?,
                false => self.lone_statistics(sum, || ()),
            });
        }
        Ok(formed)
    }

    fn form_sums(&self, sums: &[Sum], meanwhile: impl FnOnce()) -> Result<Vec<Vec<Statistics>>, Fault> {
        match &self.spilled {
            None => Ok(self.accumulate(sums, meanwhile)),
            Some(spilled) => sums
                .iter()
                .map(|sum| self.accumulate_spilled(spilled, sum, self.is_last(sum.micro_step)))
                .collect(),
        }
    }

    pub(super) fn is_last(&self, micro_step: MicroStep) -> bool {
        micro_step.0 + 1 == self.spec.micro_steps
    }

    /// Takes the statistics of a sum that an earlier process had formed. Returns the first element that is inf or NaN.
    pub(in crate::job) fn form_statistics_again(&self, owned: OwnedShard, step: Step) -> Option<u64> {
        let buffers = &self.shards[owned.index()];
        let slot = self.slot(step);
        let formed = match &buffers.accumulators[slot.index()] {
            None => self.statistics_of_lone(&[(owned, slot)], || ()).pop().unwrap_or_default(),
            Some(accumulator) => {
                let accumulator = lock(accumulator);
                let blocks = accumulator.f32().chunks(BLOCK).collect();
                self.compute.blocks(blocks, |block| statistics(self.compute.isa(), Gradient::f32(block)))
            }
        };
        self.find_left_out(owned, slot);
        let nonfinite = first_nonfinite(&formed);
        *lock(&buffers.statistics[slot.index()]) = formed;
        nonfinite
    }

    fn blocks_of(&self, owned: OwnedShard) -> usize {
        self.layout.shard_len(self.owned[owned.index()]) as usize / BLOCK
    }

    fn lone_statistics(&self, sums: &[Sum], meanwhile: impl FnOnce()) -> Vec<Vec<Statistics>> {
        let places: Vec<_> = sums.iter().map(|sum| (sum.owned, sum.slot)).collect();
        self.statistics_of_lone(&places, meanwhile)
    }

    /// Returns the statistics of lone gradients. Statistics that were not taken on arrival are taken here.
    fn statistics_of_lone(
        &self,
        places: &[(OwnedShard, GradientSlot)],
        meanwhile: impl FnOnce(),
    ) -> Vec<Vec<Statistics>> {
        let isa = self.compute.isa();
        let lone: Vec<_> = places
            .iter()
            .map(|&(owned, slot)| lock(self.contribution(owned, slot, Contributor::LONE)))
            .collect();
        let known = places.iter().zip(&lone);
        let known: Vec<Vec<_>> = known
            .map(|(&(owned, _), lone)| {
                (0..self.blocks_of(owned)).map(|block| lone.statistics(block)).collect()
            })
            .collect();
        if let Some(all) = known.iter().map(|shard| shard.iter().copied().collect()).collect() {
            return all;
        }
        let shards = known.into_iter().zip(&lone).map(|(known, lone)| {
            let whole = lone.gradient(self.spec.gradient_dtype);
            known.into_iter().enumerate().map(|(block, known)| (block, known, whole)).collect()
        });
        let block = |(block, known, whole): (usize, Option<Statistics>, Gradient<'_>)| {
            known.unwrap_or_else(|| statistics(isa, whole.slice(block * BLOCK..(block + 1) * BLOCK)))
        };
        self.compute.groups(shards.collect(), block, meanwhile)
    }

    fn accumulate(&self, sums: &[Sum], meanwhile: impl FnOnce()) -> Vec<Vec<Statistics>> {
        let isa = self.compute.isa();
        let shard = |sum: &Sum| &self.shards[sum.owned.index()];
        let mut accumulators: Vec<_> = sums
            .iter()
            .filter_map(|sum| shard(sum).accumulators[sum.slot.index()].as_ref().map(lock))
            .collect();
        let mut contributions: Vec<Vec<_>> = sums
            .iter()
            .map(|sum| shard(sum).contributions[sum.slot.index()].iter().map(lock).collect())
            .collect();
        let gradients = contributions.iter().map(|ranks| {
            ranks.iter().map(|contribution| contribution.gradient(self.spec.gradient_dtype)).collect()
        });
        let gradients: Vec<Vec<Gradient<'_>>> = gradients.collect();
        let shards = sums.iter().zip(&gradients).zip(&mut accumulators).map(|((sum, ranks), accumulator)| {
            let (first, checked) = (sum.micro_step.0 == 0, self.is_last(sum.micro_step));
            let blocks = accumulator.f32_mut().chunks_mut(BLOCK).enumerate();
            blocks.map(|(block, sum)| Part { block, sum, ranks, first, checked }).collect()
        });
        let block = |part: Part<'_>| {
            let Part { block, sum, ranks, first, checked } = part;
            // All ranks of a block come before the next block, so that the 256 KiB sum stays in cache.
            let range = block * BLOCK..block * BLOCK + sum.len();
            let mut taken = Statistics::NONE;
            for (rank, whole) in ranks.iter().enumerate() {
                let (first, last) = (first && rank == 0, rank + 1 == ranks.len());
                taken = add(isa, whole.slice(range.clone()), sum, first, checked && last);
            }
            taken
        };
        let taken = self.compute.groups(shards.collect(), block, meanwhile);
        contributions.iter_mut().flatten().for_each(|contribution| contribution.give_back());
        taken
    }
}
