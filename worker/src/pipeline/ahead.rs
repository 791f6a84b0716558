//! What the next step will compute with, before it begins.

use std::ops::Range;

use longshore_proto::{Step, Version};

use super::{Pipeline, Weights, feeds};
use crate::{
    error::{Misuse, Result},
    pull::Feed,
};

impl Pipeline {
    /// The weights of the next step, once they have been asked for. That is done in [`Pipeline::finish`]. In a delayed
    /// job it is done in [`Pipeline::begin`] already, if the host's memory has room for them.
    pub fn upcoming(&self) -> Option<Feed> {
        self.feeds.next().cloned()
    }

    /// The version that the next step computes with.
    pub fn next_reads(&self) -> Version {
        self.options.schedule.reads(Step(self.last.0 + 1))
    }

    /// Asks for the weights of the next step, if nothing has asked for them yet, and returns them as they arrive. A process
    /// that joined calls it before its first step.
    ///
    /// # Errors
    /// `Misuse` with `Weights::OnDemand`; a dead server.
    pub fn ask_for_next(&mut self) -> Result<Feed> {
        let reads = self.next_reads();
        self.feeds.open_ahead(&self.session, &self.options.weights, reads)?;
        self.upcoming().ok_or_else(|| Misuse("the pipeline pulls on demand: use Pipeline::pull").into())
    }

    /// Whether the images of the last step's version differ from the master weights: they make up for the delay of the
    /// steps that read them.
    pub fn images_are_corrected(&self) -> bool {
        self.options.corrects(self.last)
    }

    /// Has weights be pulled on demand from now on, and gives up those that were asked for. Nothing is changed where all
    /// servers lend their weights: these take no memory here, and who asks for all of them can lend gradients. Returns
    /// whether weights are pulled on demand.
    pub fn pull_on_demand(&mut self) -> bool {
        if !matches!(self.options.weights, Weights::OnDemand) && !self.session.pulls.are_lent() {
            // Nobody will see all weights of a version any more, by which lent gradients are taken back.
            feeds::await_updates(&self.session, self.last.version());
            self.options.weights = Weights::OnDemand;
            self.feeds.clear();
            self.session.pulls.start_over();
        }
        matches!(self.options.weights, Weights::OnDemand)
    }

    /// Some flat ranges of a version, as they arrive. They come from what was asked for of that version, if they are all in it;
    /// otherwise they are pulled. The version may be that of the step in hand, of the next one, or the one that was drained to.
    pub fn fetch(&mut self, version: Version, order: &[Range<u64>]) -> Result<Feed> {
        let reading = match self.feeds.of(version) {
            Some(feed) if order.iter().all(|range| feed.covers(range)) => return Ok(feed.clone()),
            Some(feed) => feed.reading().clone(),
            None => self.feeds.shared_reading(version),
        };
        self.session.pull_as(reading, order)
    }
}
