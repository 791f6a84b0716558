//! Room for payloads that a call keeps until its reader takes them.

use std::{sync::Arc, time::Duration};

use longshore_proto::{Fault, FaultKind, limits::MAX_UNFINISHED_BYTES};
use longshore_wire::direct::{Bounds, Held, Taps};
use tokio::time::{Instant, sleep};

/// How long a call that finds no room waits before it looks again. What holds the room is sent meanwhile, 1 MiB of it in a
/// millisecond where its reader takes it.
const PAUSE: Duration = Duration::from_millis(5);

/// What strangers share. A rank's connection has room of its own, which was counted when its job was admitted.
pub(super) struct Room {
    bounds: Arc<Bounds>,
    connection: Option<Taps>,
}

impl Room {
    /// `connection` is that of the call.
    pub(super) fn new(bounds: &Arc<Bounds>, connection: Option<&Taps>) -> Room {
        Room { bounds: Arc::clone(bounds), connection: connection.cloned() }
    }

    /// Takes room for a payload, once there is any; None on a rank's connection.
    ///
    /// # Errors
    /// `Unavailable` at the deadline.
    pub(super) async fn hold(&self, bytes: usize, deadline: Instant) -> Result<Option<Held>, Fault> {
        loop {
            if self.connection.as_ref().is_some_and(Taps::is_vouched) {
                return Ok(None);
            }
            if let Some(held) = self.bounds.hold(bytes) {
                return Ok(Some(held));
            }
            if Instant::now() >= deadline {
                let value = format!("{bytes} bytes, among others that their readers do not take");
                let limit = format!("within {MAX_UNFINISHED_BYTES} bytes with them");
                return Err(Fault::new(FaultKind::Unavailable, "pull", value, limit, "try again"));
            }
            sleep(PAUSE).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn strangers_wait_for_room_and_ranks_do_not() {
        let bounds = Arc::new(Bounds::default());
        let known = Taps::default();
        let room = Room::new(&bounds, Some(&known));
        let deadline = Instant::now() + Duration::from_millis(20);
        let all = room.hold(MAX_UNFINISHED_BYTES, deadline).await.unwrap();
        let refused = room.hold(1, deadline).await.err().map(|fault| fault.kind);
        assert_eq!(refused, Some(FaultKind::Unavailable));
        assert!(Instant::now() >= deadline, "it did not wait");
        known.vouch();
        assert!(room.hold(1, deadline).await.unwrap().is_none());
        drop(all);
        assert!(Room::new(&bounds, None).hold(MAX_UNFINISHED_BYTES, deadline).await.unwrap().is_some());
    }
}
