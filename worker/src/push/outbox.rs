//! Retains complete chunks, and queues each for one of its owner's connections. A full queue blocks the caller.
//! Called by assemblers, on the trainer's threads.

use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering::Relaxed},
};

use tokio::sync::mpsc::error::TrySendError;
use tracing::debug_span;

use super::{
    ChunkKey, Gradients, Payload,
    retained::{Chunk, LaneId},
};
use crate::{
    cluster::Impatience,
    error::{Result, TimedOut},
    host::Instant,
    pull::Reading,
};

pub(crate) struct Outbox {
    gradients: Arc<Gradients>,
    loss_scale: f64,
    /// The version that the gradient is computed with.
    reading: Reading,
    /// Number of micro-steps of the step that are wholly pushed.
    finished: Arc<AtomicU32>,
}

impl Outbox {
    pub(crate) fn new(
        gradients: Arc<Gradients>,
        loss_scale: f64,
        reading: Reading,
        finished: Arc<AtomicU32>,
    ) -> Outbox {
        Outbox { gradients, loss_scale, reading, finished }
    }

    pub(super) fn gradients(&self) -> &Gradients {
        &self.gradients
    }

    pub(super) fn check(&self) -> Result<()> {
        self.gradients.cluster.waits.check()
    }

    pub(super) fn finish(&self) {
        self.finished.fetch_add(1, Relaxed);
    }

    /// Returns the lanes of a chunk, one to each holder of its shard. Chunks of a shard take turns over a server's
    /// connections, and a chunk always takes the same connection.
    fn lanes(&self, key: &ChunkKey) -> Vec<LaneId> {
        let turn = (key.shard.0 as usize).wrapping_add(key.chunk.0 as usize);
        let cluster = &self.gradients.cluster;
        let connection = turn % cluster.options.connections;
        cluster.holders_at(key.shard, key.step).map(|server| LaneId { server, connection }).collect()
    }

    pub(crate) fn send(&self, key: ChunkKey, payload: Payload, crc32: u32) -> Result<()> {
        let queues = self.gradients.queues()?;
        let lanes = self.lanes(&key);
        self.gradients.meter.moved((payload.bytes.len() * lanes.len()) as u64);
        let (loss_scale, reads) = (self.loss_scale, self.reading.reads());
        self.gradients.retained.keep(key, Chunk { payload, crc32, loss_scale, reads }, &lanes);
        lanes.into_iter().try_for_each(|lane| match queues[lane.server][lane.connection].try_send(key) {
            Ok(()) => Ok(()),
            Err(TrySendError::Full(_)) => self.wait_for_room(lane, key),
            // The lane has ended with the session's failure, or its server is given up.
            Err(TrySendError::Closed(_)) => self.check(),
        })
    }

    fn wait_for_room(&self, lane: LaneId, key: ChunkKey) -> Result<()> {
        let start = Instant::now();
        let _stage = debug_span!(target: "stage", "wait for room", step = key.step.0).entered();
        let (cluster, queues) = (&self.gradients.cluster, self.gradients.queues()?);
        let server = cluster.address(lane.server);
        let sent = cluster.runtime.block_on(async {
            let what = format!("server {server} to take gradients of {}", key.step);
            let room = async {
                tokio::select! {
                    sent = queues[lane.server][lane.connection].send(key) => sent.is_ok(),
                    () = cluster.left(lane.server) => false,
                }
            };
            match cluster.watched(&what, cluster.patiently(room)).await {
                Ok(true) => Ok(()),
                Ok(false) => self.check(),
                Err(Impatience::Failed(error)) => Err(error),
                Err(Impatience::Elapsed(waited)) => Err(TimedOut {
                    what: "room in the queue of gradients",
                    server: Some(server.into()),
                    job: cluster.job().clone(),
                    step: Some(key.step),
                    shard: Some(key.shard),
                    version: None,
                    waited,
                    last: None,
                }
                .into()),
            }
        });
        self.gradients.meter.held_up(start.elapsed());
        sent
    }
}
