//! A unit from the wish for it to its release.

use std::time::{Duration, Instant};

use tracing::debug_span;

use super::{
    OUTSIDE, UnitWeights, Units,
    loads::{Loads, State},
    policy::{Demand, Item},
    version,
};
use crate::{
    cluster::Impatience,
    error::{Error, Misuse, Result, TimedOut, UnitError},
    pull::Feed,
};

impl Units {
    /// Waits until a unit's weights are in device memory, in the version that the pass reads, and keeps them there.
    ///
    /// # Errors
    /// `Unit` for one that is acquired already, or does not fit beside those that are; `TimedOut` naming server, shard and
    /// version.
    pub fn acquire(&self, unit: usize) -> Result<UnitWeights> {
        let started = Instant::now();
        let _stage = debug_span!(target: "stage", "acquire", unit).entered();
        let item = self.uses(unit)?;
        let mut late = false;
        loop {
            let feed = {
                let mut state = self.loads.lock();
                match self.demand(&mut state, item)? {
                    Demand::Here => {
                        let lost = Misuse("a unit's memory was given up while it was acquired");
                        let buffer = Loads::buffer(&state, item).ok_or(lost)?;
                        let (address, bytes) = (buffer.address(), buffer.bytes());
                        drop(state);
                        self.count(late.then(|| started.elapsed()));
                        return Ok(UnitWeights { address, bytes, version: version(item.label) });
                    }
                    _ => Loads::feed(&state, item),
                }
            };
            late = true;
            if let Err(error) = self.wait(item, feed) {
                self.give_up(item);
                return Err(error);
            }
        }
    }

    /// Notes that a unit is used now.
    fn uses(&self, unit: usize) -> Result<Item> {
        self.check(unit)?;
        if !self.pass().begun {
            return Err(OUTSIDE.into());
        }
        let mut state = self.loads.lock();
        let item = Item { unit, label: state.policy.label() };
        if state.policy.held().any(|held| held == item) {
            return Err(UnitError::AcquiredTwice { unit: self.name(unit) }.into());
        }
        state.policy.uses(unit);
        Ok(item)
    }

    fn demand(&self, state: &mut State, item: Item) -> Result<Demand> {
        if let Some(error) = Loads::failure(state, item) {
            return Err(error);
        }
        let (demand, actions) = state.policy.demand(item.unit);
        self.loads.perform(state, actions, Some(item))?;
        if let Demand::NoRoom { held } = demand {
            let place = &self.loads.places[item.unit];
            let (unit, bytes) = (self.name(item.unit), place.elements * self.loads.dtype.bytes());
            return Err(UnitError::NoRoom { unit, bytes, held, budget: self.budget() }.into());
        }
        Ok(demand)
    }

    /// Waits for weights that are on their way, or for a copy that is in the way.
    fn wait(&self, item: Item, feed: Option<Feed>) -> Result<()> {
        let place = &self.loads.places[item.unit];
        if let Some(feed) = &feed {
            place.ranges.iter().try_for_each(|range| feed.wait(range.clone()))?;
        }
        let started = Instant::now();
        let cluster = self.loads.pulls.cluster();
        let copied = self.loads.until(|state| match &feed {
            Some(_) => Loads::feed(state, item).is_none(),
            None => !state.policy.awaits_copy(item.unit),
        });
        let waited = cluster.runtime.block_on(async {
            match cluster.waits.patiently(cluster.options.deadline, copied).await {
                Ok(()) => Ok(()),
                Err(Impatience::Failed(error)) => Err(error),
                Err(Impatience::Elapsed(waited)) => Err(self.late(item, waited)),
            }
        });
        self.loads.pulls.meter.held_up(started.elapsed());
        waited
    }

    /// The failure of weights that came and were not copied to the device in time.
    fn late(&self, item: Item, waited: Duration) -> Error {
        let cluster = self.loads.pulls.cluster();
        TimedOut {
            what: "a copy of weights to the device",
            server: None,
            job: cluster.job().clone(),
            step: None,
            shard: None,
            version: Some(version(item.label)),
            waited,
            last: None,
        }
        .into()
    }

    /// Notes that nobody waits for a unit any more.
    fn give_up(&self, item: Item) {
        let mut state = self.loads.lock();
        let actions = state.policy.release(item.unit);
        // The error that is on its way to the caller came first.
        let _ = self.loads.perform(&mut state, actions, None);
    }

    fn count(&self, late: Option<Duration>) {
        let report = &mut self.pass().report;
        report.acquired += 1;
        report.late += u64::from(late.is_some());
        report.waited += late.unwrap_or_default();
    }

    /// Frees a unit's memory for what comes next. The device's own work with it must be finished.
    ///
    /// # Errors
    /// `Unit` for a unit that is not acquired.
    pub fn release(&self, unit: usize) -> Result<()> {
        self.check(unit)?;
        let mut state = self.loads.lock();
        let item = Item { unit, label: state.policy.label() };
        if !state.policy.held().any(|held| held == item) {
            return Err(UnitError::NotAcquired { unit: self.name(unit) }.into());
        }
        let actions = state.policy.release(unit);
        self.loads.perform(&mut state, actions, None)
    }

    /// Hands a unit's weights to `read` in host memory. The unit is acquired.
    ///
    /// # Errors
    /// `Unit` for a unit that is not acquired; `Device` where the device fails.
    pub fn read<R>(&self, unit: usize, read: impl FnOnce(&[u8]) -> R) -> Result<R> {
        self.check(unit)?;
        let (buffer, host) = {
            let mut state = self.loads.lock();
            let item = Item { unit, label: state.policy.label() };
            let held = state.policy.held().any(|held| held == item);
            let buffer = Loads::buffer(&state, item).filter(|_| held);
            let buffer = buffer.ok_or_else(|| UnitError::NotAcquired { unit: self.name(unit) })?;
            let host = state.memory.take_host(buffer.bytes())?;
            (buffer, host)
        };
        let host = self.loads.device.copy_out(&buffer, 0, host)?.wait()?;
        let result = read(&host);
        let freed = self.loads.lock().memory.give_back_host(host);
        drop(freed);
        Ok(result)
    }
}
