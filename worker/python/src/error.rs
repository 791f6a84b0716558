//! Maps errors of the worker library to exceptions of `longshore.errors`, and ends waits on Ctrl-C.

use std::{
    cell::RefCell,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

use longshore_proto::{Fault, FaultKind};
use longshore_worker::{
    Error, Interrupt, Result,
    error::{GradientError, Interrupted, Invalid},
};
use pyo3::{prelude::*, types::PyDict};

use crate::log;

/// The remedy for a loop in Python. The native trainer starts again by itself.
const START_AGAIN: &str = ". Nothing is lost on the servers: end all ranks and start them again. With Hugging Face's Trainer \
    pass resume_from_checkpoint=longshore.huggingface.newest(trainer); a loop of your own goes on behind optimizer.version";

thread_local! {
    /// The exception that a signal handler raised while this thread waited.
    static RAISED: RefCell<Option<PyErr>> = const { RefCell::new(None) };
    /// The flag with which another thread ends the waits of this thread.
    static CANCELLED: RefCell<Option<Arc<AtomicBool>>> = const { RefCell::new(None) };
}

/// Lets Python handle signals while a call waits. The wait ends if a handler raises, as Ctrl-C's does, or if
/// another thread has cancelled it.
pub(crate) fn signals() -> Interrupt {
    Interrupt::when(is_ended)
}

/// Returns true if this thread must end its wait.
pub(crate) fn is_ended() -> bool {
    if CANCELLED.with_borrow(|cancelled| cancelled.as_ref().is_some_and(|cancelled| cancelled.load(Relaxed)))
    {
        return true;
    }
    let asked = Python::attach(|py| log::pass_on(py).and_then(|()| py.check_signals()));
    let Err(error) = asked else { return false };
    RAISED.with_borrow_mut(|raised| *raised = Some(error));
    true
}

/// Makes the waits of this thread end once the flag is set, until the returned guard is dropped.
pub(crate) fn until(cancelled: &Arc<AtomicBool>) -> Until {
    CANCELLED.set(Some(Arc::clone(cancelled)));
    Until
}

pub(crate) struct Until;

impl Drop for Until {
    fn drop(&mut self) {
        CANCELLED.set(None);
    }
}

/// Ends a wait with an exception of a Python callback, which [`raise`] returns.
pub(crate) fn raised(error: PyErr) -> Error {
    RAISED.with_borrow_mut(|raised| *raised = Some(error));
    Interrupted.into()
}

/// Runs `act` without the GIL. Log records since the last call are passed to Python first. Records of a failed
/// call are passed with its error.
pub(crate) fn without_gil<T: Send>(py: Python<'_>, act: impl FnOnce() -> Result<T> + Send) -> PyResult<T> {
    log::pass_on(py)?;
    py.detach(act).map_err(|error| {
        let raised = raise(py, &error);
        log::pass_on(py).err().unwrap_or(raised)
    })
}

/// Returns the exception for an error.
pub(crate) fn raise(py: Python<'_>, error: &Error) -> PyErr {
    let raised = RAISED.with_borrow_mut(Option::take);
    if let (Error::Interrupted(_), Some(raised)) = (error, raised) {
        return raised;
    }
    let mut message = error.to_string();
    if let Error::Outdated(_) = error {
        message.push_str(START_AGAIN);
    }
    exception(py, class(error), &message, fault(error)).unwrap_or_else(|broken| broken)
}

/// Makes an exception of a class of `longshore.errors`.
pub(crate) fn exception(
    py: Python<'_>,
    class: &str,
    message: &str,
    fault: Option<&Fault>,
) -> PyResult<PyErr> {
    let fields = PyDict::new(py);
    if let Some(fault) = fault {
        fields.set_item("field", &fault.field)?;
        fields.set_item("value", &fault.value)?;
        fields.set_item("limit", &fault.limit)?;
        fields.set_item("remedy", &fault.remedy)?;
    }
    let class = py.import("longshore.errors")?.getattr(class)?;
    Ok(PyErr::from_value(class.call((message,), Some(&fields))?))
}

fn class(error: &Error) -> &'static str {
    match error {
        Error::Invalid(_) | Error::Device(_) => "InvalidError",
        Error::Gradient(GradientError::Missing { .. }) => "MissingGradientError",
        Error::Gradient(_) => "GradientError",
        Error::Unreachable(_) => "UnreachableError",
        Error::Untrusted(_) => "UntrustedError",
        Error::Call(failed) => match failed.fault.kind {
            // The transport's faults of this kind name the call. A server's fault of this kind names a field of the
            // job.
            FaultKind::Unavailable if failed.fault.field.starts_with("call to ") => "UnreachableError",
            FaultKind::Deadline => "WaitError",
            _ => "RefusedError",
        },
        Error::Refused(_) | Error::MissingBlock(_) => "RefusedError",
        Error::Fenced(_) => "FencedError",
        Error::Outdated(_) => "OutdatedError",
        Error::StateLost(_)
        | Error::VersionsDiffer(_)
        | Error::NotRestored(_)
        | Error::StateKept(_)
        | Error::NoCheckpoint(_)
        | Error::OtherCheckpoints(_)
        | Error::OtherFilling(_) => "StateError",
        Error::TimedOut(_) => "WaitError",
        Error::StillPaused(_) => "PausedError",
        Error::Shortage(_) => "ShortageError",
        Error::Misuse(_) | Error::Interrupted(_) => "UsageError",
        Error::Environment(_) => "LongshoreError",
    }
}

fn fault(error: &Error) -> Option<&Fault> {
    match error {
        Error::Invalid(Invalid(fault)) => Some(fault),
        Error::Call(failed) => Some(&failed.fault),
        Error::Untrusted(untrusted) => Some(&untrusted.fault),
        Error::Refused(refused) => Some(&refused.fault),
        Error::Fenced(fenced) => Some(&fenced.fault),
        Error::Outdated(outdated) => Some(&outdated.fault),
        _ => None,
    }
}
