//! Finds the parameters of a shard that no rank gave a gradient.

use std::ops::Range;

use longshore_proto::{Fault, ShardId, Step};

use super::{super::Job, Gradients};
use crate::{
    ids::{Contributor, GradientSlot, OwnedShard},
    kernels::{Gradient, Isa, widen},
    lock,
};

/// Returns true if an element is -0. A sum is -0 only if every addend is -0. So the first element of a
/// parameter's gradient shows that no rank had one: workers send +0 there in a real gradient.
fn is_nothing(isa: Isa, gradient: Gradient<'_>, element: usize) -> bool {
    let mut value = [0.0];
    widen(isa, gradient.slice(element..element + 1), &mut value);
    value[0].to_bits() == (-0.0f32).to_bits()
}

impl Gradients {
    /// Records the left-out parameters of a complete gradient. A gradient on the drives was scanned before it
    /// was written.
    pub(super) fn find_left_out(&self, owned: OwnedShard, slot: GradientSlot) {
        if !self.spec.leave_out {
            return;
        }
        let found = if self.accumulates(owned) {
            let Some(sum) = self.accumulator(owned, slot).filter(|_| self.spilled.is_none()) else { return };
            self.left_out_of(owned, 0, Gradient::f32(lock(sum).f32()))
        } else {
            let lone = lock(self.contribution(owned, slot, Contributor::LONE));
            match self.spilled.is_some() && !lone.is_lent() {
                true => lone.left_out(),
                false => self.left_out_of(owned, 0, lone.gradient(self.spec.gradient_dtype)),
            }
        };
        self.set_left_out(owned, slot, found);
    }

    /// Returns the left-out parameters that begin in a part of a shard's gradient. The part begins at element
    /// `first` of the shard.
    pub(super) fn left_out_of(&self, owned: OwnedShard, first: usize, part: Gradient<'_>) -> Vec<u32> {
        if !self.spec.leave_out {
            return Vec::new();
        }
        let start = self.layout.shard_range(self.owned[owned.index()]).start + first as u64;
        let params: Range<usize> = self.layout.params_from(start..start + part.len() as u64);
        let at = |param: usize| (self.layout.param_range(param).start - start) as usize;
        let nothing = params.filter(|&param| is_nothing(self.compute.isa(), part, at(param)));
        nothing.map(|param| param as u32).collect()
    }

    pub(super) fn set_left_out(&self, owned: OwnedShard, slot: GradientSlot, found: Vec<u32>) {
        *lock(&self.shards[owned.index()].left_out[slot.index()]) = found;
    }

    /// Returns the parameters that were found, in ascending order.
    pub(in crate::job) fn left_out(&self, owned: OwnedShard, slot: GradientSlot) -> Vec<u32> {
        lock(&self.shards[owned.index()].left_out[slot.index()]).clone()
    }
}

impl Job {
    /// Returns the parameters that begin in a shard and got no gradient in a complete step.
    pub fn left_out(&self, shard: ShardId, step: Step) -> Result<Vec<u32>, Fault> {
        let machine = self.protocol.machine();
        let owned = machine.owned_index(shard)?;
        machine.check_stats(step)?;
        Ok(self.gradients.left_out(owned, self.gradients.slot(step)))
    }
}
