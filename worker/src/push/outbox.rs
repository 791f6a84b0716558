//! Where complete chunks go: kept, then queued for one of their owner's connections, with back-pressure.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    time::Instant,
};

use tokio::sync::mpsc::error::TrySendError;
use tracing::debug_span;

use super::{
    ChunkKey, Payload,
    retained::{Chunk, LaneId},
};
use crate::{
    error::{Misuse, Result, TimedOut},
    pull::Reading,
    session::{Core, Impatience, Meter, SharedCore},
};

pub(crate) struct Outbox {
    core: SharedCore,
    loss_scale: f64,
    /// What the gradient is computed with.
    reading: Reading,
    /// Micro-steps of the step that are wholly pushed.
    finished: Arc<AtomicU32>,
}

impl Outbox {
    pub(crate) fn new(
        core: SharedCore,
        loss_scale: f64,
        reading: Reading,
        finished: Arc<AtomicU32>,
    ) -> Outbox {
        Outbox { core, loss_scale, reading, finished }
    }

    pub(super) fn core(&self) -> &Core {
        &self.core
    }

    pub(super) fn check(&self) -> Result<()> {
        self.core.check()
    }

    pub(super) fn finish(&self) {
        self.finished.fetch_add(1, Relaxed);
    }

    /// Chunks of a shard take turns over the owner's connections: the same chunk always takes the same one.
    fn lane(&self, key: &ChunkKey) -> LaneId {
        let turn = (key.shard.0 as usize).wrapping_add(key.chunk.0 as usize);
        (self.core.owner(key.shard), turn % self.core.options.connections)
    }

    pub(crate) fn send(&self, key: ChunkKey, payload: Payload, crc32: u32) -> Result<()> {
        let lanes = self.core.lanes.get().ok_or(Misuse("join before pushing"))?;
        let lane = self.lane(&key);
        self.core.meter.pushed_bytes.fetch_add(payload.bytes.len() as u64, Relaxed);
        let (loss_scale, reads) = (self.loss_scale, self.reading.reads());
        self.core.retained.keep(key, Chunk { payload, crc32, loss_scale, reads, lane });
        let queue = lanes.queue(lane);
        match queue.try_send(key) {
            Ok(()) => Ok(()),
            Err(TrySendError::Full(_)) => self.wait_for_room(lane, key),
            // The lane ended: with the session's failure.
            Err(TrySendError::Closed(_)) => self.core.check(),
        }
    }

    fn wait_for_room(&self, lane: LaneId, key: ChunkKey) -> Result<()> {
        let start = Instant::now();
        let _stage = debug_span!(target: "stage", "wait for room", step = key.step.0).entered();
        let core = &self.core;
        let lanes = core.lanes.get().ok_or(Misuse("join before pushing"))?;
        let sent = core.block_on(async {
            let what = format!("server {} to take gradients of {}", core.peers[lane.0].address, key.step);
            let room = core.patiently(core.options.deadline, lanes.queue(lane).send(key));
            match core.watched(&what, room).await {
                Ok(Ok(())) => Ok(()),
                Ok(Err(_)) => core.check(),
                Err(Impatience::Failed(error)) => Err(error),
                Err(Impatience::Elapsed(waited)) => Err(TimedOut {
                    what: "room in the queue of gradients",
                    server: Some(core.peers[lane.0].address.clone()),
                    job: core.job().clone(),
                    step: Some(key.step),
                    shard: Some(key.shard),
                    version: None,
                    waited,
                    last: None,
                }
                .into()),
            }
        });
        Meter::add(&core.meter.push_nanos, start.elapsed());
        sent
    }
}
