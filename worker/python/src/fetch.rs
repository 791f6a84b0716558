//! Weights on their way into tensors. Whoever waits for them holds up no other call of the job.

use std::sync::{
    Arc, Mutex, PoisonError,
    atomic::{AtomicBool, Ordering::Relaxed},
};

use longshore_worker::error::Misuse;
use pyo3::prelude::*;

use crate::{
    call::Call,
    error::{raise, until, without_gil},
    training::Weighed,
};

const GONE: Misuse = Misuse("these weights were read or given up: fetch them again");

/// Weights that were asked for, and the tensors that they go to. It is private to the package.
#[pyclass(frozen, module = "longshore._longshore")]
pub(crate) struct Fetch {
    /// The job's number.
    job: usize,
    /// None once somebody reads them, or they were given up. Then the memory that they came in is free for others.
    left: Mutex<Option<Weighed>>,
    is_cancelled: Arc<AtomicBool>,
}

impl Fetch {
    pub(crate) fn new(job: usize, weights: Weighed) -> Fetch {
        Fetch { job, left: Mutex::new(Some(weights)), is_cancelled: Arc::default() }
    }

    fn take(&self) -> Option<Weighed> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

#[pymethods]
impl Fetch {
    /// Waits for the weights and writes them into the tensors. Once it has returned, or raised, nothing is written any more.
    fn read(&self, py: Python<'_>) -> PyResult<()> {
        let _call = Call::of(py, self.job)?;
        let weights = self.take();
        let Some(weights) = weights else {
            return Err(raise(py, &GONE.into()));
        };
        let _until = until(&self.is_cancelled);
        without_gil(py, move || weights.write())
    }

    /// Ends the wait of a thread that reads. If nobody does, the weights are given up.
    fn cancel(&self) {
        self.is_cancelled.store(true, Relaxed);
        drop(self.take());
    }
}
