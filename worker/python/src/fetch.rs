//! Fetches weights into tensors. A thread that waits for a fetch blocks no other call of the job.

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

/// Waits for weights and writes them into tensors. Owns the memory in which they arrive.
type Read = Box<dyn FnOnce() -> Result<()> + Send>;

/// Requested weights, and their target tensors. Private to the package.
#[pyclass(frozen, module = "longshore._longshore")]
pub(crate) struct Fetch {
    /// The job's number.
    job: usize,
    /// None once the weights were read or given up; their memory is then free.
    left: Mutex<Option<Read>>,
    is_cancelled: Arc<AtomicBool>,
    /// True if a server of this host lends the weights in its memory, so that nothing is transferred.
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
    /// Waits for the weights and writes them into the tensors. Once the call returns or raises, no tensor is written
    /// any more.
    fn read(&self, py: Python<'_>) -> PyResult<()> {
        let _call = Call::of(py, self.job)?;
        let Some(read) = self.take() else {
            return Err(raise(py, &GONE.into()));
        };
        let _until = until(&self.is_cancelled);
        without_gil(py, read)
    }

    /// Ends the wait of a reading thread. Without a reader, abandons the pull.
    fn cancel(&self) {
        self.is_cancelled.store(true, Relaxed);
        drop(self.take());
    }
}
