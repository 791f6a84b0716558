//! Admission of contributions: the slot of a chunk, and the work that follows once a chunk is stored.

use longshore_proto::{ContributionChunk, Step};

use super::{
    machine::{Admission, Machine, Sum, Ticket, Work},
    refusal::Refusal,
};
use crate::ids::{Contributor, GradientSlot, OwnedShard};

impl Machine {
    /// Decides on one chunk. After `New` the caller stores the bytes, and calls [`Machine::stored`] or
    /// [`Machine::abandoned`].
    pub fn admit(&mut self, chunk: &ContributionChunk) -> Result<Admission<Ticket>, Refusal> {
        self.check_not_loading()?;
        let contribution = chunk.contribution;
        self.check_rank(contribution.rank, chunk.incarnation)?;
        if !self.has_joined(contribution.rank, chunk.incarnation) {
            return Err(Refusal::NotJoined { rank: contribution.rank });
        }
        let (owned, contributor) = self.check_chunk(chunk)?;
        let step = contribution.step;
        if step.0 <= self.version.0 {
            // The step is decided, so the chunk had arrived: the worker missed an acknowledgement.
            return Ok(Admission::Decided);
        }
        self.check_running()?;
        let newest = Step(self.version.0 + self.spec.gradient_slots() as u64);
        if step > newest {
            return Err(Refusal::StepTooEarly { step, newest });
        }
        if !self.owns(owned, step) {
            return Err(self.elsewhere(contribution.shard, step));
        }
        if !self.check_reads(chunk)? || !self.check_scale(chunk)? {
            return Ok(Admission::Busy);
        }
        let shard = &mut self.shards[owned.index()];
        let (slot, chunks) = (shard.slot_of(step), shard.chunks);
        let verdict = shard.slot_mut(step).judge(chunk, contributor, chunks)?;
        let is_last = contribution.micro_step.0 + 1 == self.spec.micro_steps;
        if is_last && matches!(verdict, Admission::Duplicate | Admission::Superseded) {
            shard.slot_mut(step).sent(chunk, contributor);
        }
        Ok(verdict.and_then(|()| {
            self.settle(step, chunk.loss_scale);
            self.note_reads(chunk);
            Admission::New(Ticket { owned, slot, contributor, chunk: *chunk })
        }))
    }

    fn check_chunk(&self, chunk: &ContributionChunk) -> Result<(OwnedShard, Contributor), Refusal> {
        let contribution = chunk.contribution;
        let owned = self.owned_index(contribution.shard)?;
        let shard = &self.shards[owned.index()];
        if shard.is_frozen() {
            let first = self.layout.params_in(self.layout.shard_range(contribution.shard)).start;
            let param = self.spec.params.get(first).map(|param| param.name.clone()).unwrap_or_default();
            return Err(Refusal::Frozen { contribution, param });
        }
        let contributor = shard.contributor(contribution.rank).ok_or_else(|| Refusal::NotContributor {
            contribution,
            contributors: shard.contributors.clone(),
        })?;
        if contribution.step.0 == 0 {
            return Err(Refusal::StepZero);
        }
        let (micro_step, micro_steps) = (contribution.micro_step, self.spec.micro_steps);
        if micro_step.0 >= micro_steps {
            return Err(Refusal::UnknownMicroStep { micro_step, micro_steps });
        }
        if chunk.dtype != self.spec.gradient_dtype {
            return Err(Refusal::WrongDtype { dtype: chunk.dtype, expected: self.spec.gradient_dtype });
        }
        let whole = self.layout.shard_len(contribution.shard) * chunk.dtype.bytes();
        let place = match chunk.lent {
            true => (chunk.chunk.0 == 0).then_some(0..whole),
            false => self.layout.chunk_bytes(contribution.shard, chunk.chunk, chunk.dtype),
        };
        let Some(range) = place else {
            let chunks = if chunk.lent { 1 } else { self.shards[owned.index()].chunks };
            return Err(Refusal::UnknownChunk { shard: contribution.shard, chunk: chunk.chunk, chunks });
        };
        let expected = range.end - range.start;
        if chunk.bytes != expected {
            return Err(Refusal::WrongLength {
                contribution,
                chunk: chunk.chunk,
                bytes: chunk.bytes,
                expected,
            });
        }
        if !(chunk.loss_scale.is_finite() && chunk.loss_scale > 0.0) {
            return Err(Refusal::BadLossScale { loss_scale: chunk.loss_scale });
        }
        Ok((owned, contributor))
    }

    /// Notes that the ticket's bytes are stored.
    pub fn stored(&mut self, ticket: Ticket) -> Option<Work> {
        let Ticket { owned, slot, contributor, chunk } = ticket;
        let contribution = chunk.contribution;
        let rank = &mut self.ranks[contribution.rank.index()];
        rank.last_step = rank.last_step.max(contribution.step);
        let shard = &mut self.shards[owned.index()];
        let contributions = shard.contributors.len();
        let held = &mut shard.slots[slot.index()];
        if contribution.micro_step.0 + 1 == self.spec.micro_steps {
            held.sent(&chunk, contributor);
        }
        let last = held.stored(&chunk, contributor);
        let (step, micro_step) = (contribution.step, contribution.micro_step);
        last.then_some(Work::Sum(Sum { owned, contributions, slot, step, micro_step }))
    }

    /// Notes that the ticket's bytes did not arrive.
    pub fn abandoned(&mut self, ticket: Ticket) {
        let slot = &mut self.shards[ticket.owned.index()].slots[ticket.slot.index()];
        slot.abandoned(&ticket.chunk, ticket.contributor);
        self.unsettle();
    }

    /// Notes that a [`Work::Sum`] is done. Returns true once the shard's gradient of the step is complete. `nonfinite`
    /// is then its first element that is inf or NaN.
    pub fn summed(&mut self, owned: OwnedShard, slot: GradientSlot, nonfinite: Option<u64>) -> bool {
        self.shards[owned.index()].slots[slot.index()].summed(self.spec.micro_steps, nonfinite)
    }

    /// Takes up a gradient that an earlier process had summed, as [`Machine::summed`] takes a new one.
    pub fn summed_before(&mut self, owned: OwnedShard, step: Step, nonfinite: Option<u64>) {
        self.shards[owned.index()].slot_mut(step).nonfinite = nonfinite;
    }
}
