//! Sums of contributions, on the compute thread. Also gradient statistics, and parameters without a gradient from any
//! rank.

use std::collections::VecDeque;

use longshore_proto::{Fault, MicroStep, Step};

use super::{super::compute::BLOCK, Gradients, contribution::add};
use crate::{
    ids::{Contributor, GradientSlot, OwnedShard},
    kernels::{Gradient, Isa, Statistics, statistics, widen},
    lock,
    step::{Sum, Work},
};

/// Largest number of sums that are formed together. Formed one by one, threads wait for each other 0.08 ms a shard. The
/// work for a lone gradient takes 0.28 ms on two cores.
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
pub(in crate::job) fn first_nonfinite(statistics: &[Statistics]) -> Option<u64> {
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

/// Returns true if an element is -0. A sum is -0 only if every addend is. Workers send +0 as the first element of a
/// real gradient, so -0 there shows that no rank had a gradient.
fn is_nothing(isa: Isa, gradient: Gradient<'_>, element: usize) -> bool {
    let mut value = [0.0];
    widen(isa, gradient.slice(element..element + 1), &mut value);
    value[0].to_bits() == (-0.0f32).to_bits()
}

impl Gradients {
    /// Forms these sums, or takes the statistics of lone gradients. Returns the statistics of each sum's blocks. If
    /// update threads take part, the calling thread runs `meanwhile` while they begin.
    pub(in crate::job) fn form(
        &self,
        sums: &[Sum],
        meanwhile: impl FnOnce(),
    ) -> Result<Vec<Vec<Statistics>>, Fault> {
        let accumulates = |sum: &Sum| self.share.accumulates(sum.owned);
        let (mut meanwhile, mut formed) = (Some(meanwhile), Vec::with_capacity(sums.len()));
        for run in sums.chunk_by(|a, b| accumulates(a) == accumulates(b)) {
            let meanwhile = || meanwhile.take().into_iter().for_each(|meanwhile| meanwhile());
            formed.extend(match accumulates(&run[0]) {
                true => self.form_sums(run, meanwhile)?,
                false => self.lone_statistics(run, meanwhile),
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

    pub(in crate::job) fn is_last(&self, micro_step: MicroStep) -> bool {
        micro_step.0 + 1 == self.share.spec.micro_steps
    }

    /// Takes the statistics of a sum that an earlier process had formed. Returns the first element that is inf or NaN.
    pub(in crate::job) fn form_statistics_again(&self, owned: OwnedShard, step: Step) -> Option<u64> {
        let buffers = &self.shards[owned.index()];
        let slot = self.share.slot(step);
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
                (0..self.share.blocks(owned)).map(|block| lone.statistics(block)).collect()
            })
            .collect();
        if let Some(all) = known.iter().map(|shard| shard.iter().copied().collect()).collect() {
            return all;
        }
        let shards = known.into_iter().zip(&lone).map(|(known, lone)| {
            let whole = lone.gradient(self.share.spec.gradient_dtype);
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
            .map(|sum| {
                shard(sum).contributions[sum.slot.index()][..sum.contributions].iter().map(lock).collect()
            })
            .collect();
        let gradients = contributions.iter().map(|ranks| {
            ranks.iter().map(|contribution| contribution.gradient(self.share.spec.gradient_dtype)).collect()
        });
        let gradients: Vec<Vec<Gradient<'_>>> = gradients.collect();
        let shards = sums.iter().zip(&gradients).zip(&mut accumulators).map(|((sum, ranks), accumulator)| {
            let (first, checked) = (sum.micro_step.0 == 0, self.is_last(sum.micro_step));
            let blocks = accumulator.f32_mut().chunks_mut(BLOCK).enumerate();
            blocks.map(|(block, sum)| Part { block, sum, ranks, first, checked }).collect()
        });
        let block = |part: Part<'_>| {
            let Part { block, sum, ranks, first, checked } = part;
            // All ranks' parts of a block are added before the next block, so that its 256 KiB sum stays in cache.
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

    /// Records the left-out parameters of a complete gradient. A gradient on the drives was scanned before it
    /// was written.
    pub(in crate::job) fn find_left_out(&self, owned: OwnedShard, slot: GradientSlot) {
        if !self.share.spec.leave_out {
            return;
        }
        let found = if self.share.accumulates(owned) {
            let Some(sum) = self.accumulator(owned, slot).filter(|_| self.spilled.is_none()) else { return };
            self.left_out_of(owned, 0, Gradient::f32(lock(sum).f32()))
        } else {
            let lone = lock(self.contribution(owned, slot, Contributor::LONE));
            match self.spilled.is_some() && !lone.is_lent() {
                true => lone.left_out(),
                false => self.left_out_of(owned, 0, lone.gradient(self.share.spec.gradient_dtype)),
            }
        };
        self.set_left_out(owned, slot, found);
    }

    /// Returns the left-out parameters that begin in a part of a shard's gradient. The part begins at element
    /// `first` of the shard.
    pub(in crate::job) fn left_out_of(
        &self,
        owned: OwnedShard,
        first: usize,
        part: Gradient<'_>,
    ) -> Vec<u32> {
        if !self.share.spec.leave_out {
            return Vec::new();
        }
        let layout = &self.share.layout;
        let start = layout.shard_range(self.share.shard(owned)).start + first as u64;
        let params = layout.params_from(start..start + part.len() as u64);
        let at = |param: usize| (layout.param_range(param).start - start) as usize;
        let nothing = params.filter(|&param| is_nothing(self.compute.isa(), part, at(param)));
        nothing.map(|param| param as u32).collect()
    }
}
