//! An optimizer server inside the Python process.

use std::{path::PathBuf, process};

use longshore_server::{Config, Embedded, config::StorageConfig};
use pyo3::prelude::*;

use crate::error::exception;

/// A server on a free loopback port of this process. It ends with this object.
#[pyclass(frozen, module = "longshore._longshore")]
pub(crate) struct Server {
    embedded: Option<Embedded>,
    /// The process that it runs in: a fork has none of its threads.
    process: u32,
}

#[pymethods]
impl Server {
    #[new]
    #[pyo3(signature = (*, memory=None, threads=None, checkpoints=None, state_dirs=Vec::new(), resident=0, shm_dir=None))]
    fn new(
        py: Python<'_>,
        memory: Option<u64>,
        threads: Option<usize>,
        checkpoints: Option<(PathBuf, usize)>,
        state_dirs: Vec<PathBuf>,
        resident: u64,
        shm_dir: Option<PathBuf>,
    ) -> PyResult<Server> {
        let (checkpoint_dir, checkpoint_keep) = checkpoints.unzip();
        let change = move |defaults: Config| Config {
            storage: StorageConfig { state_dirs, resident, shm_dir, ..defaults.storage },
            threads: threads.unwrap_or(defaults.threads),
            memory: memory.unwrap_or(defaults.memory),
            checkpoint_dir,
            checkpoint_keep: checkpoint_keep.unwrap_or(defaults.checkpoint_keep),
            ..defaults
        };
        match py.detach(|| Embedded::start(change)) {
            Ok(embedded) => Ok(Server { embedded: Some(embedded), process: process::id() }),
            Err(error) => Err(exception(py, "LongshoreError", &error.to_string(), None)?),
        }
    }

    /// The address that `servers=` takes.
    #[getter]
    fn address(&self) -> Option<String> {
        self.embedded.as_ref().map(|embedded| embedded.address().to_string())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if self.process != process::id() {
            // This is a fork, which has neither the threads nor the right to end them.
            std::mem::forget(self.embedded.take());
        }
    }
}
