//! Tasks that run beside the calls that wait for their results.

use longshore_proto::{Fault, FaultKind};
use tokio::task::{JoinHandle, spawn_blocking};

/// Runs long engine work on a blocking thread, away from network threads.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Fault> + Send + 'static,
) -> Result<T, Fault> {
    finished(spawn_blocking(work)).await
}

/// Waits for a spawned task, which continues if the waiting call is dropped.
pub(crate) async fn finished<T>(task: JoinHandle<Result<T, Fault>>) -> Result<T, Fault> {
    task.await.unwrap_or_else(|error| {
        Err(Fault::new(
            FaultKind::Internal,
            "task",
            error,
            "finished",
            "see the server's log; this is a defect",
        ))
    })
}
