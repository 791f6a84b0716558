//! The Rust half of the Python package `longshore`: a rank's job over host memory, an embedded server, and both
//! commands. The module is private to that package, whose own classes check their users' arguments.

mod call;
mod error;
mod export;
mod fetch;
mod filling;
mod helpers;
mod job;
mod lent;
mod log;
#[allow(unsafe_code, reason = "memory of tensors is known to Rust by its address alone")]
mod memory;
mod server;
mod settings;
mod training;
mod turns;
mod weights;

use std::ffi::OsString;

use pyo3::prelude::*;

#[pymodule]
fn _longshore(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<job::Job>()?;
    module.add_class::<fetch::Fetch>()?;
    module.add_class::<lent::GradientMemory>()?;
    module.add_class::<lent::LentWeights>()?;
    module.add_class::<lent::ImageMemory>()?;
    module.add_class::<server::Server>()?;
    module.add_function(wrap_pyfunction!(longshore, module)?)?;
    module.add_function(wrap_pyfunction!(longshored, module)?)?;
    module.add_function(wrap_pyfunction!(helpers::set_copy_threads, module)?)?;
    module.add_function(wrap_pyfunction!(settings::lies_on_drives, module)?)?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))
}

/// Runs `longshore` with these arguments, which begin with the program's name. Returns its exit code.
#[pyfunction]
fn longshore(py: Python<'_>, arguments: Vec<OsString>) -> u8 {
    py.detach(|| longshore_cli::run(arguments))
}

/// Runs `longshored` with these arguments, which begin with the program's name, until it is told to stop. Returns
/// its exit code.
#[pyfunction]
fn longshored(py: Python<'_>, arguments: Vec<OsString>) -> u8 {
    py.detach(|| longshore_server::run(arguments))
}
