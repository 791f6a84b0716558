//! The commands `longshore` and `longshored`, so that the wheel is a whole install.

use std::ffi::OsString;

use pyo3::prelude::*;

/// Runs `longshore` with these arguments, which begin with the program's name. Returns its exit code.
#[pyfunction]
pub(crate) fn longshore(py: Python<'_>, arguments: Vec<OsString>) -> u8 {
    py.detach(|| longshore_cli::run(arguments))
}

/// Runs `longshored` with these arguments, which begin with the program's name, until it is told to stop. Returns
/// its exit code.
#[pyfunction]
pub(crate) fn longshored(py: Python<'_>, arguments: Vec<OsString>) -> u8 {
    py.detach(|| longshore_server::run(arguments))
}
