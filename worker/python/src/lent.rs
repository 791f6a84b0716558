//! Weights where they lie in the memory of servers of this host, for a device that copies them from there itself.

use std::ops::Range;

use longshore_worker::{self as worker, Feed, Lent, Result};
use pyo3::prelude::*;

use crate::{call::Call, error::without_gil, training::Training, weights::From};

/// A parameter's weights: runs of them, each as its address, its first element and how many it has.
type Runs = Vec<(usize, u64, u64)>;

/// Weights of some parameters that lie in servers' memory. They stay mapped as long as this is there. It is private to the package.
#[pyclass(frozen, module = "longshore._longshore")]
pub(crate) struct LentWeights {
    /// The job's number.
    job: usize,
    feed: Feed,
    places: Vec<Range<u64>>,
    /// Of each parameter.
    #[pyo3(get)]
    runs: Vec<Runs>,
}

impl LentWeights {
    pub(crate) fn of_job(self, job: usize) -> LentWeights {
        LentWeights { job, ..self }
    }
}

#[pymethods]
impl LentWeights {
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
    /// Waits for the weights of these parameters that were asked for, and says where they lie in servers' memory. None where some lie
    /// elsewhere, or are amended.
    pub(crate) fn lent_weights(&mut self, params: &[usize]) -> Result<Option<LentWeights>> {
        let Some((_, From::Images(feed))) = self.unread_weights()? else { return Ok(None) };
        let places: Vec<_> = params.iter().map(|&param| self.places.at(param)).collect::<Result<_>>()?;
        let mut runs = Vec::with_capacity(places.len());
        for place in &places {
            let Some(found) = feed.addresses(place.clone())? else { return Ok(None) };
            let run = |(run, address): Lent| (address, run.start - place.start, run.end - run.start);
            runs.push(found.into_iter().map(run).collect());
        }
        Ok(Some(LentWeights { job: 0, feed, places, runs }))
    }
}
