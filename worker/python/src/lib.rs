//! The Rust half of the Python package `longshore`: a rank's job over host memory, an embedded server, and both
//! commands. The module is private to that package, whose own classes check their users' arguments.

mod call;
mod commands;
mod error;
mod export;
mod fetch;
mod filling;
mod gradients;
mod helpers;
mod job;
mod lent;
mod log;
#[allow(unsafe_code, reason = "memory of tensors is known to Rust by its address alone")]
mod memory;
mod report;
mod server;
mod settings;
mod training;
mod turns;
mod weights;

use pyo3::prelude::*;

#[pymodule]
fn _longshore(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<job::Job>()?;
    module.add_class::<fetch::Fetch>()?;
    module.add_class::<gradients::GradientMemory>()?;
    module.add_class::<lent::LentWeights>()?;
    module.add_class::<lent::ImageMemory>()?;
    module.add_class::<server::Server>()?;
    module.add_function(wrap_pyfunction!(commands::longshore, module)?)?;
    module.add_function(wrap_pyfunction!(commands::longshored, module)?)?;
    module.add_function(wrap_pyfunction!(helpers::set_copy_threads, module)?)?;
    module.add_function(wrap_pyfunction!(settings::lies_on_drives, module)?)?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))
}
