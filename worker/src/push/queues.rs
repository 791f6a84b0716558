//! Queues of chunks to send, one for each data connection.

use longshore_proto::ServerId;
use tokio::sync::mpsc;

use super::ids::{ChunkKey, LaneId};
use crate::cluster::ByServer;

pub(super) struct Queues(ByServer<Vec<mpsc::Sender<ChunkKey>>>);

impl Queues {
    /// `open` starts the lane that takes from a queue, and returns the queue's sender.
    pub(super) fn new(
        servers: impl Iterator<Item = ServerId>,
        connections: usize,
        open: impl Fn(LaneId) -> mpsc::Sender<ChunkKey>,
    ) -> Queues {
        let of = |server| (0..connections).map(|connection| open(LaneId { server, connection })).collect();
        Queues(servers.map(of).collect())
    }

    pub(super) fn of(&self, LaneId { server, connection }: LaneId) -> &mpsc::Sender<ChunkKey> {
        &self.0[server][connection]
    }
}
