//! Weights on their way into tensors. Whoever waits for them holds up no other call of the job.

use std::sync::{
    Arc, Mutex, PoisonError,
    atomic::{AtomicBool, Ordering::Relaxed},
};

use longshore_worker::{Result, error::Misuse};
use pyo3::prelude::*;

use crate::{
    call::Call,
    error::{raise, until, without_gil},
};

const GONE: Misuse = Misuse("these weights were read or given up: fetch them again");

/// Waits for weights and writes them into tensors. It holds the memory that they come in.
type Read = Box<dyn FnOnce() -> Result<()> + Send>;

/// Weights that were asked for, and the tensors that they go to. It is private to the package.
#[pyclass(frozen, module = "longshore._longshore")]
pub(crate) struct Fetch {
    /// The job's number.
    job: usize,
    /// None once somebody reads them, or they were given up. Then the memory that they came in is free for others.
    left: Mutex<Option<Read>>,
    is_cancelled: Arc<AtomicBool>,
    /// Whether a server of this host lends the weights where they lie in its memory, so that nothing is on its way.
    #[pyo3(get)]
    is_lent: bool,
}

impl Fetch {
    pub(crate) fn new(
        job: usize,
        is_lent: bool,
        read: impl FnOnce() -> Result<()> + Send + 'static,
    ) -> Fetch {
        Fetch { job, left: Mutex::new(Some(Box::new(read))), is_cancelled: Arc::default(), is_lent }
    }

    fn take(&self) -> Option<Read> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

#[pymethods]
impl Fetch {
    /// Waits for the weights and writes them into the tensors. Once it has returned, or raised, nothing is written any more.
    fn read(&self, py: Python<'_>) -> PyResult<()> {
        let _call = Call::of(py, self.job)?;
        let Some(read) = self.take() else {
            return Err(raise(py, &GONE.into()));
        };
        let _until = until(&self.is_cancelled);
        without_gil(py, read)
    }

    /// Ends the wait of a thread that reads. If nobody does, the weights are given up.
    fn cancel(&self) {
        self.is_cancelled.store(true, Relaxed);
        drop(self.take());
    }
}
