//! An optimizer server inside the Python process.

use std::{
    path::PathBuf,
    process,
    sync::{Mutex, PoisonError},
};

use longshore_proto::Fault;
use longshore_server::{
    Config, Embedded, ServerError,
    config::{ConfigError, Spill, StorageConfig},
};
use pyo3::prelude::*;

use crate::{error::exception, log};

/// A server in this process, on a Unix socket of this user. `close` or dropping the object ends it.
#[pyclass(frozen, module = "longshore._longshore")]
pub(crate) struct Server {
    address: String,
    /// None once the server has ended.
    embedded: Mutex<Option<Embedded>>,
    /// Id of the process that runs the server. A fork has none of the server's threads.
    process: u32,
}

#[pymethods]
impl Server {
    #[new]
    #[pyo3(signature = (*, nvme, memory=None, threads=None, checkpoints=None, shm_dir=None))]
    fn new(
        py: Python<'_>,
        nvme: (Vec<PathBuf>, u64, String),
        memory: Option<u64>,
        threads: Option<usize>,
        checkpoints: Option<(PathBuf, usize)>,
        shm_dir: Option<PathBuf>,
    ) -> PyResult<Server> {
        let (state_dirs, resident, spill) = nvme;
        let spill: Spill = spill.parse().map_err(|fault: Fault| invalid(py, &fault.to_string(), &fault))?;
        let (checkpoint_dir, checkpoint_keep) = checkpoints.unzip();
        let change = move |defaults: Config| Config {
            storage: StorageConfig { state_dirs, resident, spill, shm_dir, ..defaults.storage },
            threads: threads.unwrap_or(defaults.threads),
            memory: memory.unwrap_or(defaults.memory),
            checkpoint_dir,
            checkpoint_keep: checkpoint_keep.unwrap_or(defaults.checkpoint_keep),
            ..defaults
        };
        log::listen();
        match py.detach(|| Embedded::start(change)) {
            Ok(embedded) => {
                let address = embedded.address().to_string();
                Ok(Server { address, embedded: Mutex::new(Some(embedded)), process: process::id() })
            }
            Err(error) => Err(refused(py, &error)),
        }
    }

    /// The server's address, for `servers=`.
    #[getter]
    fn address(&self) -> &str {
        &self.address
    }

    /// Ends the server, and waits until its folders are no longer in use. Further calls do nothing.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.end());
    }
}

/// Returns the exception for a server that does not start.
fn refused(py: Python<'_>, error: &ServerError) -> PyErr {
    let said = error.to_string();
    let ServerError::Config(ConfigError::Value { field, value, limit }) = error else {
        return exception(py, "LongshoreError", &said, None).unwrap_or_else(|broken| broken);
    };
    invalid(py, &said, &Fault::invalid(*field, value, limit, "give the server another value"))
}

fn invalid(py: Python<'_>, said: &str, fault: &Fault) -> PyErr {
    exception(py, "InvalidError", said, Some(fault)).unwrap_or_else(|broken| broken)
}

impl Server {
    fn end(&self) {
        let embedded = self.embedded.lock().unwrap_or_else(PoisonError::into_inner).take();
        if self.process == process::id() {
            drop(embedded);
        } else {
            // A fork has none of the server's threads, and must not end them.
            std::mem::forget(embedded);
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Other threads may need Python while the server ends. While Python itself ends, no thread needs it.
        if Python::try_attach(|py| py.detach(|| self.end())).is_none() {
            self.end();
        }
    }
}
