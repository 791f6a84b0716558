//! The versions that gradients are computed with. Such a version has not been taken back, and all ranks compute a
//! micro-step with the same one.

use longshore_proto::{Contribution, ContributionChunk, Incarnation, MicroStep, Rank, Step, Version};

use super::{machine::Machine, refusal::Refusal};

impl Machine {
    /// Refuses a gradient computed with a version that has since been taken back and decided anew. Refuses
    /// also a gradient whose version differs from another rank's. Returns false while this server has not
    /// reached that version: rank 0 tells a restarted server how the version was decided. The rank may have
    /// computed with another decision. A version that the server does not remember passes.
    pub(super) fn check_reads(&self, chunk: &ContributionChunk) -> Result<bool, Refusal> {
        let reads = chunk.reads;
        let (decided_by, unknown) = (self.decided_by(reads.version), Incarnation::default());
        if reads.decided_by != unknown {
            if reads.version > self.version {
                return Ok(false);
            }
            if decided_by != unknown && reads.decided_by != decided_by {
                return Err(Refusal::Withdrawn { reads, decided_by });
            }
        }
        match self.said_otherwise(chunk) {
            None => Ok(true),
            Some((other, version)) => {
                let contribution = chunk.contribution;
                Err(Refusal::OtherReads { contribution, reads: reads.version, other, version })
            }
        }
    }

    /// Returns a rank that computes the chunk's micro-step with another version, and that version. It may be an earlier
    /// process of the same rank, if a sum contains its gradient.
    fn said_otherwise(&self, chunk: &ContributionChunk) -> Option<(Rank, Version)> {
        let Contribution { step, micro_step, .. } = chunk.contribution;
        let said = self.reads.get(&(step, micro_step)).filter(|_| self.is_said(chunk))?;
        said.iter().copied().find(|&(_, version)| version != chunk.reads.version)
    }

    /// Returns true if the chunk states its version. A chunk that does not leaves the version at 0.
    fn is_said(&self, chunk: &ContributionChunk) -> bool {
        chunk.reads.version.0 + 1 + u64::from(self.spec.max_delay) >= chunk.contribution.step.0
    }

    /// Notes the version that an admitted chunk was computed with.
    pub(super) fn note_reads(&mut self, chunk: &ContributionChunk) {
        if !self.is_said(chunk) {
            return;
        }
        let Contribution { step, micro_step, rank, .. } = chunk.contribution;
        let said = self.reads.entry((step, micro_step)).or_default();
        if said.iter().all(|&(known, _)| known != rank) {
            said.push((rank, chunk.reads.version));
        }
    }

    /// Forgets the versions that a rank's earlier process computed with, unless a sum contains its gradient. Its next
    /// process may compute with another version, as the other ranks do.
    pub(super) fn forget_reads_of(&mut self, rank: Rank) {
        let Machine { reads, shards, .. } = self;
        for (&(step, micro_step), said) in reads {
            if !shards.iter().any(|shard| shard.slot(step).has_summed(step, micro_step)) {
                said.retain(|&(known, _)| known != rank);
            }
        }
    }

    /// Returns the loss scale of a step, and the version of its first micro-step, as far as contributions stated them.
    pub fn computed_with(&self, step: Step) -> (Option<f64>, Option<Version>) {
        let said = self.reads.get(&(step, MicroStep(0))).and_then(|said| said.first());
        (self.settled(step), said.map(|&(_, version)| version))
    }

    /// Takes up the loss scale and the version of a sum that an earlier process of this server formed.
    pub fn was_computed_with(&mut self, step: Step, (scale, reads): (Option<f64>, Option<Version>)) {
        if !self.shards.iter().any(|shard| shard.slot(step).step == Some(step)) {
            return;
        }
        scale.into_iter().for_each(|scale| self.settle(step, scale));
        let said = reads.map(|version| ((step, MicroStep(0)), vec![(Rank(0), version)]));
        self.reads.extend(said);
    }

    /// Forgets the versions that decided steps were computed with.
    pub(super) fn forget_reads_of_decided(&mut self) {
        let next = self.version.next_step();
        self.reads = self.reads.split_off(&(next, MicroStep(0)));
    }
}
