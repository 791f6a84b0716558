//! Statements of a contribution: the version that it was computed with, and its loss scale.
//!
//! All ranks compute a micro-step with one version, which was not taken back. All contributions to a step have one loss
//! scale, which a version that the step may read has set.

use longshore_proto::{Commit, Contribution, ContributionChunk, Incarnation, MicroStep, Rank, Step, Version};

use super::{machine::Machine, refusal::Refusal};

/// The relative difference allowed between a commit's gradient scale and its factors' product. Clients may multiply in
/// another order.
const ROUNDING: f64 = 1e-12;

/// Constraint on the loss scale of a step.
enum Known {
    /// The scale is one of `scales`. `open` means that the step may read a version that is undecided here.
    OneOf { scales: Vec<f64>, open: bool },
    /// The step may read version 0, or a version whose commit this server does not have.
    Anything,
}

impl Machine {
    /// Refuses a gradient computed with a version that was since taken back and decided anew. Also refuses a gradient
    /// whose version differs from another rank's. Returns false while this server has not reached that version: a
    /// restarted server has yet to hear its decision. A version that the server does not remember passes.
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

    /// Returns a rank that computes the chunk's micro-step with another version, and that version. The rank may be the
    /// chunk's own, whose earlier process is in a sum.
    fn said_otherwise(&self, chunk: &ContributionChunk) -> Option<(Rank, Version)> {
        let Contribution { step, micro_step, .. } = chunk.contribution;
        let said = self.reads.get(&(step, micro_step)).filter(|_| self.is_said(chunk))?;
        said.iter().copied().find(|&(_, version)| version != chunk.reads.version)
    }

    /// Returns true if the chunk states its version. Otherwise the version is 0, older than any that the step may read.
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

    /// Forgets the versions that a rank's earlier process computed with, unless a sum contains its gradient. The next
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

    /// Checks a contribution's loss scale. Returns false when the contribution may read a version that is undecided
    /// here.
    pub(super) fn check_scale(&self, chunk: &ContributionChunk) -> Result<bool, Refusal> {
        let (contribution, loss_scale) = (chunk.contribution, chunk.loss_scale);
        let same = |scale: &f64| scale.to_bits() == loss_scale.to_bits();
        if let Some(earlier) = self.settled(contribution.step) {
            return match same(&earlier) {
                true => Ok(true),
                false => Err(Refusal::OtherLossScale { contribution, loss_scale, earlier }),
            };
        }
        match self.known_scales(contribution.step) {
            Known::Anything => Ok(true),
            Known::OneOf { scales, .. } if scales.iter().any(same) => Ok(true),
            Known::OneOf { open: true, .. } => Ok(false),
            Known::OneOf { scales, .. } => {
                Err(Refusal::WrongLossScale { contribution, loss_scale, expected: scales })
            }
        }
    }

    /// Checks that a decision divides by the scale of its gradient.
    pub(super) fn check_gradient_scale(&self, commit: &Commit) -> Result<(), Refusal> {
        let scales = match (self.settled(commit.step), self.known_scales(commit.step)) {
            (Some(settled), _) => vec![settled],
            (None, Known::OneOf { scales, .. }) => scales,
            (None, Known::Anything) => return Ok(()),
        };
        let contributions = self.spec.contributions(self.world_size);
        let fits = |scale: &f64| {
            let expected = scale * contributions as f64;
            (commit.gradient_scale - expected).abs() <= expected * ROUNDING
        };
        match scales.iter().any(fits) {
            true => Ok(()),
            false => {
                let (step, gradient_scale) = (commit.step, commit.gradient_scale);
                Err(Refusal::WrongGradientScale { step, gradient_scale, scales, contributions })
            }
        }
    }

    fn known_scales(&self, step: Step) -> Known {
        let newest = step.0.saturating_sub(1);
        let oldest = newest.saturating_sub(self.spec.max_delay.into());
        let mut scales = Vec::new();
        for version in (oldest..=newest.min(self.version.0)).rev() {
            match self.commits.iter().find(|decided| decided.commit.step.version() == Version(version)) {
                Some(decided) => scales.push(decided.loss_scale()),
                None => return Known::Anything,
            }
        }
        Known::OneOf { scales, open: newest > self.version.0 }
    }

    pub(super) fn settled(&self, step: Step) -> Option<f64> {
        self.scales.iter().find(|(held, _)| *held == step).map(|&(_, scale)| scale)
    }

    /// Makes the first contribution's loss scale the step's.
    pub(super) fn settle(&mut self, step: Step, loss_scale: f64) {
        if self.settled(step).is_none() {
            self.scales.push((step, loss_scale));
        }
    }

    /// Forgets the loss scales of steps without contributions: a later contribution may bring another scale.
    pub(super) fn unsettle(&mut self) {
        let Machine { scales, shards, .. } = self;
        scales.retain(|(step, _)| shards.iter().any(|shard| shard.slot(*step).step == Some(*step)));
    }
}
