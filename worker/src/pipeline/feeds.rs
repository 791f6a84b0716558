//! Feeds of the current step and of the next step. Weights are requested as early as possible. The pipeline owns the
//! feeds, on the trainer's thread.

use std::ops::Range;

use longshore_proto::{Step, Version};

use super::{Pipeline, options::Weights};
use crate::{
    error::{Misuse, Result},
    pull::{Feed, Reading},
    session::Session,
};

#[derive(Default)]
pub(super) struct Feeds {
    now: Option<Feed>,
    next: Option<Feed>,
    /// Readings of versions that are pulled on demand, oldest first. A version's reading is kept from its first pull
    /// on.
    readings: Vec<Reading>,
}

/// Largest number of versions that the current and the next step read on demand at once. Older readings are dropped.
const READINGS: usize = 4;

impl Feeds {
    /// Returns the reading that all pulls of a version share, also pulls before the step that reads the version begins.
    pub(super) fn shared_reading(&mut self, version: Version) -> Reading {
        if let Some(reading) = self.readings.iter().find(|reading| reading.version() == version) {
            return reading.clone();
        }
        let reading = Reading::new(version);
        let old = (self.readings.len() + 1).saturating_sub(READINGS);
        self.readings.drain(..old);
        self.readings.push(reading.clone());
        reading
    }

    /// Returns the current or the next step's feed, if its version is `version`.
    pub(super) fn of(&self, version: Version) -> Option<&Feed> {
        [&self.now, &self.next].into_iter().flatten().find(|feed| feed.version() == version)
    }

    /// Drops the feeds. Later pulls of their versions share the feeds' readings.
    pub(super) fn clear(&mut self) {
        for feed in [self.next.take(), self.now.take()].into_iter().flatten() {
            self.readings.retain(|reading| reading.version() != feed.version());
            self.readings.push(feed.reading().clone());
        }
    }

    pub(super) fn now(&self) -> Option<&Feed> {
        self.now.as_ref()
    }

    /// Makes the feed of `version` the current step's. The feed was kept, was opened ahead, or is opened now.
    pub(super) fn take(&mut self, session: &Session, weights: &Weights, version: Version) -> Result<()> {
        let of = |feed: &Feed| feed.version() == version;
        if self.now.as_ref().is_some_and(of) {
            return Ok(());
        }
        self.now = None;
        self.now = match self.next.take().filter(of) {
            Some(feed) => Some(feed),
            None => self.open(session, weights, version)?,
        };
        Ok(())
    }

    /// Drops the current feed unless its version is `version`. The memory then serves the next feed.
    pub(super) fn keep_only(&mut self, version: Version) {
        self.now = self.now.take().filter(|feed| feed.version() == version);
    }

    /// Starts to pull `version` for the next step. The servers hold the pull until the version is made.
    pub(super) fn open_ahead(
        &mut self,
        session: &Session,
        weights: &Weights,
        version: Version,
    ) -> Result<()> {
        if self.of(version).is_none() {
            self.next = self.open(session, weights, version)?;
        }
        Ok(())
    }

    fn open(&self, session: &Session, weights: &Weights, version: Version) -> Result<Option<Feed>> {
        let whole = 0..session.layout().elements();
        let order = match weights {
            Weights::Whole => std::slice::from_ref(&whole),
            Weights::Ranges(order) => order,
            Weights::OnDemand => return Ok(None),
        };
        session.pull_as(Reading::new(version), order).map(Some)
    }
}

/// Returns true if the next step's weights fit in the host budget beside this step's gradient.
pub(super) fn has_room_ahead(session: &Session) -> bool {
    let spec = session.spec();
    let both = spec.image_dtype.bytes() + spec.gradient_dtype.bytes();
    session.cluster.options.host_budget.free() >= session.layout().elements() * both
}

/// Waits until no gradient is lent any more, so that its memory can be used again. After a failure that memory is
/// given up.
pub(super) fn await_updates(session: &Session, version: Version) {
    if !session.gradients.retained.is_lending() {
        return;
    }
    let whole = 0..session.layout().elements();
    let pulled = session.pull(version, std::slice::from_ref(&whole));
    match pulled.and_then(|feed| feed.wait(whole.clone())) {
        Ok(()) => session.gradients.retained.updated(Step(version.0)),
        Err(error) => tracing::debug!(%error, "gradients lent to servers are given up"),
    }
}

impl Pipeline {
    /// Returns the feed of the next step's weights, once they are requested. [`Pipeline::finish`] requests them.
    /// In a delayed job [`Pipeline::begin`] requests them already, if the host's memory has room.
    pub fn upcoming(&self) -> Option<Feed> {
        self.feeds.next.clone()
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

    /// Returns true if the images of the last step's version differ from the master weights. Corrected images make up
    /// for the delay of the steps that read them.
    pub fn images_are_corrected(&self) -> bool {
        self.options.corrects(self.last)
    }

    /// Switches to pulling weights on demand, and drops the requested feeds.
    ///
    /// If all servers lend their weights, nothing changes. Lent weights take no memory here, and a rank that
    /// requests all of them can lend its gradients. Returns whether weights are pulled on demand.
    pub fn pull_on_demand(&mut self) -> bool {
        if !matches!(self.options.weights, Weights::OnDemand) && !self.session.pulls.are_lent() {
            // Lent gradients are taken back once all weights of a version have arrived. Pulls on demand never bring all
            // weights, so the last lent gradients are awaited now.
            await_updates(&self.session, self.last.version());
            self.options.weights = Weights::OnDemand;
            self.feeds.clear();
            self.session.pulls.start_over();
        }
        matches!(self.options.weights, Weights::OnDemand)
    }

    /// Returns a feed of some flat ranges of `version`. A requested feed is shared if it covers the ranges; otherwise
    /// the ranges are pulled. `version` is the current step's, the next step's, or the version of the last drain.
    pub fn pull(&mut self, version: Version, order: &[Range<u64>]) -> Result<Feed> {
        let reading = match self.feeds.of(version) {
            Some(feed) if order.iter().all(|range| feed.covers(range)) => return Ok(feed.clone()),
            Some(feed) => feed.reading().clone(),
            None => self.feeds.shared_reading(version),
        };
        self.session.pull_as(reading, order)
    }
}
