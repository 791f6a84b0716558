//! Memory for payloads that a call keeps until its reader takes them.

use std::{sync::Arc, time::Duration};

use longshore_proto::{Fault, FaultKind, limits::MAX_UNFINISHED_BYTES};
use longshore_wire::direct::{Bounds, Held, Taps};
use tokio::time::{Instant, sleep, timeout_at};

/// Polling interval of the call whose turn it is. A reader takes 1 MiB in a millisecond, so room frees up meanwhile.
/// Without turns, 4096 polling calls took a core.
const PAUSE: Duration = Duration::from_millis(5);

/// Memory that strangers share. A rank's connection has memory of its own, counted when its job was admitted.
pub(super) struct Room {
    bounds: Arc<Bounds>,
    connection: Option<Taps>,
}

impl Room {
    /// `connection` is the call's connection.
    pub(super) fn new(bounds: &Arc<Bounds>, connection: Option<&Taps>) -> Room {
        Room { bounds: Arc::clone(bounds), connection: connection.cloned() }
    }

    /// Reserves room for a payload once available. None on a rank's connection.
    ///
    /// # Errors
    /// `Unavailable` at the deadline.
    pub(super) async fn hold(&self, bytes: usize, deadline: Instant) -> Result<Option<Held>, Fault> {
        let room = async {
            tokio::select! {
                biased;
                () = self.vouched() => None,
                held = self.in_turn(bytes) => Some(held),
            }
        };
        timeout_at(deadline, room).await.map_err(|_| {
            let value = format!("{bytes} bytes, among others that their readers do not take");
            let limit = format!("within {MAX_UNFINISHED_BYTES} bytes with them");
            Fault::new(FaultKind::Unavailable, "pull", value, limit, "try again")
        })
    }

    async fn vouched(&self) {
        match &self.connection {
            Some(connection) => connection.vouched().await,
            None => std::future::pending().await,
        }
    }

    async fn in_turn(&self, bytes: usize) -> Held {
        let _turn = self.bounds.turn().await;
        loop {
            if let Some(held) = self.bounds.hold(bytes) {
                return held;
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
        let deadline = Instant::now() + Duration::from_secs(60);
        let waits = tokio::spawn(async move { room.hold(1, deadline).await.unwrap().is_none() });
        // The rank waits behind another stranger by now, and must not wait for that stranger's room.
        let stranger = Room::new(&bounds, None);
        let behind = tokio::spawn(async move { stranger.hold(1, deadline).await.is_ok() });
        tokio::task::yield_now().await;
        known.vouch();
        assert!(waits.await.unwrap(), "a rank's connection needed room");
        drop(all);
        assert!(behind.await.unwrap(), "it was not its turn when there was room");
        assert!(Room::new(&bounds, None).hold(MAX_UNFINISHED_BYTES, deadline).await.unwrap().is_some());
    }
}
