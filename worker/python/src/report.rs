//! Outcomes of steps, for Python.

use longshore_worker::StepOutcome;
use pyo3::{prelude::*, types::PyDict};

/// Returns the fields of `longshore.StepReport`. A loss is larger than the scaler's by `scale_factor`.
pub(crate) fn of_outcome<'py>(
    py: Python<'py>,
    outcome: &StepOutcome,
    scale_factor: f64,
) -> PyResult<Bound<'py, PyDict>> {
    let report = PyDict::new(py);
    report.set_item("step", outcome.step.0)?;
    report.set_item("read", outcome.read.0)?;
    report.set_item("skipped", outcome.skip)?;
    report.set_item("grad_norm", outcome.norm)?;
    report.set_item("clip_coefficient", outcome.clip_coefficient)?;
    report.set_item("loss_scale", outcome.loss_scale * scale_factor)?;
    report.set_item("overflow", &outcome.overflow)?;
    report.set_item("wall_s", outcome.timing.wall.as_secs_f64())?;
    report.set_item("exposed_s", outcome.timing.exposed.as_secs_f64())?;
    report.set_item("pushed_bytes", outcome.timing.pushed_bytes)?;
    report.set_item("pulled_bytes", outcome.timing.pulled_bytes)?;
    Ok(report)
}
