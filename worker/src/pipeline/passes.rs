//! Which weights the micro-step in hand reads, and those after it, as far as they can be asked for.

use std::ops::Range;

use longshore_proto::{Dtype, Step, Version};

use super::Pipeline;
use crate::{
    error::Result,
    pull::{Feed, Missing, Pulls, Reading},
};

/// The weights of one pass over the model: of one version, pulled whole or on demand.
#[derive(Clone)]
pub(crate) enum PassWeights {
    Whole(Feed),
    OnDemand { reading: Reading, missing: Option<Missing> },
}

impl PassWeights {
    /// The weights of one version outside of steps.
    pub(crate) fn of(version: Version) -> PassWeights {
        PassWeights::OnDemand { reading: Reading::new(version), missing: None }
    }

    pub(crate) fn version(&self) -> Version {
        match self {
            PassWeights::Whole(feed) => feed.version(),
            PassWeights::OnDemand { reading, .. } => reading.version(),
        }
    }

    /// Whether weights are amended as they are read.
    pub(crate) fn amends(&self) -> bool {
        match self {
            PassWeights::Whole(feed) => feed.amends(),
            PassWeights::OnDemand { missing, .. } => missing.is_some(),
        }
    }

    /// A feed that has these flat ranges.
    pub(crate) fn pull(
        &self,
        pulls: &std::sync::Arc<Pulls>,
        order: &[Range<u64>],
        dtype: Dtype,
    ) -> Result<Feed> {
        match self {
            PassWeights::Whole(feed) => Ok(feed.clone()),
            PassWeights::OnDemand { reading, missing } => {
                Ok(Feed::open(pulls, reading.clone(), order, dtype)?.amended(missing.clone()))
            }
        }
    }
}

impl Pipeline {
    /// The weights of the micro-step in hand.
    pub(crate) fn pass_weights(&self) -> Result<PassWeights> {
        let current = self.current()?;
        Ok(match self.feeds.now() {
            Some(feed) => PassWeights::Whole(feed.clone()),
            None => {
                PassWeights::OnDemand { reading: current.reading.clone(), missing: current.missing.clone() }
            }
        })
    }

    /// The weights of the passes after `micro_step`: those of the step's other micro-steps, and the next step's. With
    /// `pushed` this rank has pushed all of the micro-step. After the last one the version that the step makes can be asked for.
    pub(crate) fn weights_after(&mut self, micro_step: u32, pushed: bool) -> Result<Vec<PassWeights>> {
        let now = self.pass_weights()?;
        let current = self.current()?;
        let (step, micro_steps) = (current.plan.step, current.assembled.len() as u32);
        let pushed = pushed && micro_step + 1 == micro_steps;
        let mut after = Vec::new();
        for later in micro_step + 1..micro_steps {
            match self.options.schedule.newer(step, later) {
                Some(newer) if newer != now.version() => after.extend(self.ahead(newer)),
                _ => after.push(now.clone()),
            }
        }
        // What this worker will amend the next step's weights with is not known yet.
        let next = self.options.schedule.reads(Step(step.0 + 1));
        let amends = self.session.spec().worker_local && next < step.version();
        if !amends && next.0 <= self.last.0 + u64::from(pushed) {
            let same = next == now.version() && !now.amends();
            after.extend(if same { Some(now) } else { self.ahead(next) });
        }
        Ok(after)
    }

    /// The weights of a version that no micro-step has read yet. None where the pipeline pulls whole versions, and this one
    /// not yet.
    fn ahead(&mut self, version: Version) -> Option<PassWeights> {
        if self.feeds.now().is_some() {
            let next = self.feeds.next().filter(|feed| feed.version() == version);
            return next.cloned().map(PassWeights::Whole);
        }
        Some(PassWeights::OnDemand { reading: self.feeds.shared_reading(version), missing: None })
    }
}
