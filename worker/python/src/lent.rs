//! Memory for a device that copies by itself: weights in the memory of this host's servers, and this job's gradients.

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

/// Runs of a parameter's weights: address, first element within the request, and number of elements.
type Runs = Vec<(usize, u64, u64)>;

/// Weights in servers' memory, now or soon. The mapping lasts while the object lives. Private to the package.
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
    /// Waits for the weights, and returns the runs of each requested place. None if some weights lie elsewhere.
    fn runs(&self, py: Python<'_>) -> PyResult<Option<Vec<Runs>>> {
        let _call = Call::of(py, self.job)?;
        let _until = until(&self.is_cancelled);
        without_gil(py, || self.find().map_err(|error| self.feed.cause(error)))
    }

    /// Ends the wait of a thread in `runs`.
    fn cancel(&self) {
        self.is_cancelled.store(true, Relaxed);
    }

    /// Raises if a server has begun to overwrite the weights: bytes read there may then be of two versions.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        let _call = Call::of(py, self.job)?;
        without_gil(py, || {
            let checked = self.places.iter().try_for_each(|place| self.feed.check_lent(place.clone()));
            checked.map_err(|error| self.feed.cause(error))
        })
    }
}

/// A server's memory that holds weights, mapped while the object lives. Private to the package.
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

/// Keeps the memory of gradients in place, also after the job is closed. Private to the package.
#[pyclass(frozen, module = "longshore._longshore")]
pub(crate) struct GradientMemory(worker::GradientMemory);

impl GradientMemory {
    pub(crate) fn new(memory: worker::GradientMemory) -> GradientMemory {
        GradientMemory(memory)
    }
}

#[pymethods]
impl GradientMemory {
    /// Returns address and size in bytes of each piece, in whole pages, without the first `known` pieces.
    fn pieces(&self, known: usize) -> Vec<(usize, usize)> {
        self.0.pieces(known).into_iter().map(|piece| (piece.start, piece.len())).collect()
    }
}

impl Training {
    /// Returns the requested weights of `params`, if they come from servers' images.
    pub(crate) fn lent_weights(&self, params: &[usize]) -> Result<Option<(Feed, Vec<Range<u64>>)>> {
        let Some((_, From::Images(feed))) = self.unread_weights() else { return Ok(None) };
        let places = params.iter().map(|&param| self.places.at(param)).collect::<Result<_>>()?;
        Ok(Some((feed, places)))
    }

    /// Requests weights of a version that was requested or read before, if servers of this host have them in their
    /// memory. A part is a parameter, its first element and a count. Does not wait.
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
        Ok(Some((self.pipeline.pull(version, &places)?, places)))
    }
}
