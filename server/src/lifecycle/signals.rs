//! The signals that stop a server.

use tokio::signal::unix::{Signal, SignalKind, signal};

use super::error::ServerError;

/// SIGTERM and SIGINT, caught from here on, so that a signal during startup still ends in a drain. SIGHUP is caught
/// as well: its default would end a server that has nothing to reload.
pub struct StopSignals {
    terminate: Signal,
    interrupt: Signal,
    hang_up: Signal,
}

impl StopSignals {
    /// Installs the handlers. The caller must be inside a tokio runtime.
    pub fn catch() -> Result<StopSignals, ServerError> {
        Ok(StopSignals {
            terminate: signal(SignalKind::terminate()).map_err(ServerError::Signals)?,
            interrupt: signal(SignalKind::interrupt()).map_err(ServerError::Signals)?,
            hang_up: signal(SignalKind::hangup()).map_err(ServerError::Signals)?,
        })
    }

    pub(super) async fn any(&mut self) {
        loop {
            tokio::select! {
                _ = self.terminate.recv() => return,
                _ = self.interrupt.recv() => return,
                _ = self.hang_up.recv() => {
                    tracing::info!("SIGHUP: only the folder of --tls-dir is read again; where there is none, nothing is");
                }
            }
        }
    }
}
