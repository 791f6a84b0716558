//! The memory that gradients leave from, for a device that copies them there itself.

use longshore_worker as worker;
use pyo3::prelude::*;

/// While this is there, its memory stays where it is, also when the job is closed. It is private to the package.
#[pyclass(frozen, module = "longshore._longshore")]
pub(crate) struct GradientMemory(worker::GradientMemory);

impl GradientMemory {
    pub(crate) fn new(memory: worker::GradientMemory) -> GradientMemory {
        GradientMemory(memory)
    }
}

#[pymethods]
impl GradientMemory {
    /// The address and the number of bytes of each piece, whole pages, without the first `known` of them.
    fn pieces(&self, known: usize) -> Vec<(usize, usize)> {
        self.0.pieces(known).into_iter().map(|piece| (piece.start, piece.len())).collect()
    }
}
