//! Retains complete chunks, and queues each for one of its owner's connections. A full queue blocks the caller.

use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering::Relaxed},
};

use tokio::sync::mpsc::error::TrySendError;
use tracing::debug_span;

use super::{ChunkKey, Gradients, Payload, queues::LaneId, retained::Chunk};
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

    /// Returns the lane of a chunk. Chunks of a shard take turns over the owner's connections, and a chunk always
    /// takes the same one.
    fn lane(&self, key: &ChunkKey) -> LaneId {
        let turn = (key.shard.0 as usize).wrapping_add(key.chunk.0 as usize);
        let cluster = &self.gradients.cluster;
        LaneId {
            server: cluster.owner_at(key.shard, key.step),
            connection: turn % cluster.options.connections,
        }
    }

    pub(crate) fn send(&self, key: ChunkKey, payload: Payload, crc32: u32) -> Result<()> {
        let queues = self.gradients.queues()?;
        let lane = self.lane(&key);
        self.gradients.meter.moved(payload.bytes.len() as u64);
        let (loss_scale, reads) = (self.loss_scale, self.reading.reads());
        self.gradients.retained.keep(key, Chunk { payload, crc32, loss_scale, reads, lane });
        let queue = queues.of(lane);
        match queue.try_send(key) {
            Ok(()) => Ok(()),
            Err(TrySendError::Full(_)) => self.wait_for_room(lane, key),
            // The lane has ended with the session's failure.
            Err(TrySendError::Closed(_)) => self.check(),
        }
    }

    fn wait_for_room(&self, lane: LaneId, key: ChunkKey) -> Result<()> {
        let start = Instant::now();
        let _stage = debug_span!(target: "stage", "wait for room", step = key.step.0).entered();
        let (cluster, queues) = (&self.gradients.cluster, self.gradients.queues()?);
        let server = cluster.address(lane.server);
        let sent = cluster.runtime.block_on(async {
            let what = format!("server {server} to take gradients of {}", key.step);
            let room = cluster.patiently(queues.of(lane).send(key));
            match cluster.watched(&what, room).await {
                Ok(Ok(())) => Ok(()),
                Ok(Err(_)) => self.check(),
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
