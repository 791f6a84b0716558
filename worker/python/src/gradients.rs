//! The memory of gradients, for a device that copies gradients there itself.

use longshore_worker as worker;
use pyo3::prelude::*;

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
