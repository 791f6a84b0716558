//! Loss scales. All contributions to a step have one loss scale, on every rank and shard. A version that the
//! step may read has set it.

use longshore_proto::{Commit, ContributionChunk, Step, Version};

use super::{machine::Machine, refusal::Refusal};

/// The relative difference allowed between a commit's gradient scale and the product it stands for: clients may
/// multiply in another order.
const ROUNDING: f64 = 1e-12;

/// Constraint on the loss scale of a step.
enum Known {
    /// The scale is one of `scales`. `open` means that a version which the step may read is still undecided
    /// here.
    OneOf { scales: Vec<f64>, open: bool },
    /// The step may read version 0, or a version whose commit this server does not have.
    Anything,
}

impl Machine {
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
        let contributions = self.spec.contributions();
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
