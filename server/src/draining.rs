//! Flag of a drain, shared by all services.

use longshore_proto::{Fault, FaultKind};
use tokio::sync::watch;

/// Tells whether a drain has begun. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Draining {
    begun: watch::Sender<bool>,
}

impl Draining {
    pub(crate) fn new() -> Draining {
        Draining { begun: watch::Sender::new(false) }
    }

    pub(crate) fn begin(&self) {
        self.begun.send_replace(true);
    }

    /// Returns Unavailable once a drain has begun.
    pub(crate) fn refuse(&self) -> Result<(), Fault> {
        if !*self.begun.borrow() {
            return Ok(());
        }
        Err(Fault::new(
            FaultKind::Unavailable,
            "server",
            "draining",
            "serving",
            "use another server, or start it again",
        ))
    }

    pub(crate) async fn wait(&self) {
        let mut begun = self.begun.subscribe();
        // The sender lives as long as self, so the wait ends only with a drain.
        let _ = begun.wait_for(|begun| *begun).await;
    }
}
