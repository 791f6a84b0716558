//! Weights of the next step, before that step begins.

use std::ops::Range;

use longshore_proto::{Step, Version};

use super::{Pipeline, Weights, feeds};
use crate::{
    error::{Misuse, Result},
    pull::Feed,
};

impl Pipeline {
    /// Returns the feed of the next step's weights, once they are requested. [`Pipeline::finish`] requests them.
    /// In a delayed job [`Pipeline::begin`] requests them already, if the host's memory has room.
    pub fn upcoming(&self) -> Option<Feed> {
        self.feeds.next().cloned()
    }

    /// The version that the next step reads.
    pub fn next_reads(&self) -> Version {
        self.options.schedule.reads(Step(self.last.0 + 1))
    }

    /// Returns the feed of the next step's weights, and requests them first if needed. A process that joined calls
    /// this before its first step.
    ///
    /// # Errors
    /// `Misuse` with `Weights::OnDemand`; a dead server.
    pub fn ask_for_next(&mut self) -> Result<Feed> {
        let reads = self.next_reads();
        self.feeds.open_ahead(&self.session, &self.options.weights, reads)?;
        self.upcoming().ok_or_else(|| Misuse("the pipeline pulls on demand: use Pipeline::pull").into())
    }

    /// Returns true if the images of the last step's version differ from the master weights. Such images correct
    /// the delay of the steps that read them.
    pub fn images_are_corrected(&self) -> bool {
        self.options.corrects(self.last)
    }

    /// Switches to pulling weights on demand, and drops the requested feeds.
    ///
    /// If all servers lend their weights, nothing changes. Lent weights take no memory here, and a rank that
    /// requests all of them can lend its gradients. Returns whether weights are pulled on demand.
    pub fn pull_on_demand(&mut self) -> bool {
        if !matches!(self.options.weights, Weights::OnDemand) && !self.session.pulls.are_lent() {
            // Lent gradients are taken back when all weights of a version were seen. Pulls on demand never see
            // all.
            feeds::await_updates(&self.session, self.last.version());
            self.options.weights = Weights::OnDemand;
            self.feeds.clear();
            self.session.pulls.start_over();
        }
        matches!(self.options.weights, Weights::OnDemand)
    }

    /// Returns a feed of some flat ranges of `version`. A requested feed is shared if it covers them; otherwise
    /// they are pulled. `version` is that of the current step, of the next step, or the version that was drained
    /// to.
    pub fn fetch(&mut self, version: Version, order: &[Range<u64>]) -> Result<Feed> {
        let reading = match self.feeds.of(version) {
            Some(feed) if order.iter().all(|range| feed.covers(range)) => return Ok(feed.clone()),
            Some(feed) => feed.reading().clone(),
            None => self.feeds.shared_reading(version),
        };
        self.session.pull_as(reading, order)
    }
}
