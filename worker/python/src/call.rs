//! Records which jobs' calls a thread is in. A signal handler runs on the waiting thread. A call from the handler would
//! wait for ever for the call that the handler interrupts.

use std::cell::RefCell;

use pyo3::{PyResult, Python};

use crate::error::exception;

thread_local! {
    /// Numbers of the jobs whose calls this thread is in.
    static CALLED: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// A call of a job by this thread. Dropping it ends the call.
pub(crate) struct Call;

impl Call {
    /// # Errors
    /// `UsageError` if this thread is already in a call of the job.
    pub(crate) fn of(py: Python<'_>, job: usize) -> PyResult<Call> {
        let is_new = CALLED.with_borrow_mut(|called| {
            let is_new = !called.contains(&job);
            if is_new {
                called.push(job);
            }
            is_new
        });
        if is_new {
            return Ok(Call);
        }
        let message = "a signal's handler called the optimizer in the middle of one of its calls, which goes on only after the \
                       handler: set a flag there, and look at it after step";
        Err(exception(py, "UsageError", message, None)?)
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        CALLED.with_borrow_mut(Vec::pop);
    }
}
