//! Weights where they lie in the memory of servers of this host, for a device that copies them from there itself.

use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

use longshore_proto::Version;
use longshore_worker::{self as worker, Feed, Lent, Result};
use pyo3::prelude::*;

use crate::{
    call::Call,
    error::{until, without_gil},
    training::Training,
    weights::From,
};

/// Some weights of a parameter: runs of them, each as its address, its first element among these and how many it has.
type Runs = Vec<(usize, u64, u64)>;

/// Weights that lie in servers' memory, or will. They stay mapped as long as this is there. It is private to the package.
#[pyclass(frozen, module = "longshore._longshore")]
pub(crate) struct LentWeights {
    /// The job's number.
    job: usize,
    feed: Feed,
    places: Vec<Range<u64>>,
    is_cancelled: Arc<AtomicBool>,
}

impl LentWeights {
    pub(crate) fn new(job: usize, feed: Feed, places: Vec<Range<u64>>) -> LentWeights {
        LentWeights { job, feed, places, is_cancelled: Arc::default() }
    }

    fn find(&self) -> Result<Option<Vec<Runs>>> {
        let mut found = Vec::with_capacity(self.places.len());
        for place in &self.places {
            let Some(runs) = self.feed.addresses(place.clone())? else { return Ok(None) };
            let run = |(run, address): Lent| (address, run.start - place.start, run.end - run.start);
            found.push(runs.into_iter().map(run).collect());
        }
        Ok(Some(found))
    }
}

#[pymethods]
impl LentWeights {
    /// Waits for the weights, and says where they lie: for each place that was asked for, its runs. None where some lie elsewhere.
    fn runs(&self, py: Python<'_>) -> PyResult<Option<Vec<Runs>>> {
        let _call = Call::of(py, self.job)?;
        let _until = until(&self.is_cancelled);
        without_gil(py, || self.find())
    }

    /// Ends the wait of a thread that asks for the runs.
    fn cancel(&self) {
        self.is_cancelled.store(true, Relaxed);
    }

    /// Raises where a server has begun to overwrite them: what was read there may be of two versions then.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        let _call = Call::of(py, self.job)?;
        without_gil(py, || self.places.iter().try_for_each(|place| self.feed.check_lent(place.clone())))
    }
}

/// A server's memory that weights lie in, mapped as long as this is there. It is private to the package.
#[pyclass(frozen, module = "longshore._longshore")]
pub(crate) struct ImageMemory(worker::ImageMemory);

impl ImageMemory {
    pub(crate) fn new(memory: worker::ImageMemory) -> ImageMemory {
        ImageMemory(memory)
    }
}

#[pymethods]
impl ImageMemory {
    #[getter]
    fn address(&self) -> usize {
        self.0.addresses().start
    }

    #[getter]
    fn nbytes(&self) -> usize {
        self.0.addresses().len()
    }
}

impl Training {
    /// The weights of these parameters that were asked for, if they come from servers' images.
    pub(crate) fn lent_weights(&self, params: &[usize]) -> Result<Option<(Feed, Vec<Range<u64>>)>> {
        let Some((_, From::Images(feed))) = self.unread_weights() else { return Ok(None) };
        let places = params.iter().map(|&param| self.places.at(param)).collect::<Result<_>>()?;
        Ok(Some((feed, places)))
    }

    /// Asks for weights of a version that was asked for or read before, if servers of this host have it in their memory. Each part is a
    /// parameter, the first element in that and how many. It waits for nothing.
    pub(crate) fn lend(
        &mut self,
        version: Version,
        parts: &[(usize, u64, u64)],
    ) -> Result<Option<(Feed, Vec<Range<u64>>)>> {
        if self.drained == Some(version) || !self.session().lends_weights() {
            return Ok(None);
        }
        let part = |&(param, start, elements): &_| self.places.part(param, start, elements);
        let places: Vec<_> = parts.iter().map(part).collect::<Result<_>>()?;
        Ok(Some((self.pipeline.fetch(version, &places)?, places)))
    }
}
