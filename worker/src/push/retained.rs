//! Gradient chunks kept until their step is committed: what a broken connection or a restarted server is sent again.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use bytes::Bytes;
use longshore_proto::{ChunkId, MicroStep, ShardId, Step};

use crate::{device::PooledBuffer, memfd::Extent};

/// Which chunk of this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkKey {
    pub step: Step,
    pub micro_step: MicroStep,
    pub shard: ShardId,
    pub chunk: ChunkId,
}

/// A data connection: (server, connection).
pub(crate) type LaneId = (usize, usize);

/// A chunk's bytes, and where servers of this host find them.
#[derive(Clone)]
pub(crate) struct Payload {
    pub(crate) bytes: Bytes,
    pub(crate) place: Option<(Arc<Extent>, u64)>,
}

impl From<PooledBuffer> for Payload {
    fn from(buffer: PooledBuffer) -> Payload {
        let place = buffer.place();
        Payload { bytes: Bytes::from_owner(buffer), place }
    }
}

/// A chunk ready to be sent. Clones share the payload.
#[derive(Clone)]
pub(crate) struct Chunk {
    pub(crate) payload: Payload,
    pub(crate) crc32: u32,
    pub(crate) loss_scale: f64,
    pub(crate) lane: LaneId,
}

struct Entry {
    chunk: Chunk,
    sent: bool,
    acknowledged: bool,
}

/// All chunks of undecided steps, by key.
#[derive(Default)]
pub(crate) struct Retained {
    entries: Mutex<BTreeMap<ChunkKey, Entry>>,
}

impl Retained {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<ChunkKey, Entry>> {
        // Every change is one call on the map.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn keep(&self, key: ChunkKey, chunk: Chunk) {
        self.lock().insert(key, Entry { chunk, sent: false, acknowledged: false });
    }

    /// A chunk to send now; None when its step has been committed meanwhile.
    pub(crate) fn send(&self, key: &ChunkKey) -> Option<Chunk> {
        self.lock().get_mut(key).map(|entry| {
            entry.sent = true;
            entry.chunk.clone()
        })
    }

    pub(crate) fn contains(&self, key: &ChunkKey) -> bool {
        self.lock().contains_key(key)
    }

    pub(crate) fn acknowledge(&self, key: &ChunkKey) {
        if let Some(entry) = self.lock().get_mut(key) {
            entry.acknowledged = true;
        }
    }

    /// What a lane must send again after its connection broke: all it had sent, acknowledged or not, since a server that
    /// restarted has forgotten what it acknowledged. One that has not restarted answers with cheap duplicates. Chunks
    /// that still queue are left to the queue.
    pub(crate) fn to_resend(&self, lane: LaneId) -> Vec<ChunkKey> {
        let entries = self.lock();
        entries
            .iter()
            .filter(|(_, entry)| entry.sent && entry.chunk.lane == lane)
            .map(|(key, _)| *key)
            .collect()
    }

    /// The newest step with a chunk; 0 without one.
    pub(crate) fn newest(&self) -> u64 {
        self.lock().keys().next_back().map_or(0, |key| key.step.0)
    }

    /// Chunks not yet acknowledged.
    pub(crate) fn unacknowledged(&self) -> usize {
        self.lock().values().filter(|entry| !entry.acknowledged).count()
    }

    /// Frees every chunk of the steps up to and with `step`: it is committed.
    pub(crate) fn release(&self, step: Step) {
        let first_kept = ChunkKey {
            step: Step(step.0 + 1),
            micro_step: MicroStep(0),
            shard: ShardId(0),
            chunk: ChunkId(0),
        };
        let mut entries = self.lock();
        let kept = entries.split_off(&first_kept);
        let freed = std::mem::replace(&mut *entries, kept);
        drop(entries);
        drop(freed); // buffers go back to their pool outside the lock
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(step: u64, chunk: u32) -> ChunkKey {
        ChunkKey { step: Step(step), micro_step: MicroStep(0), shard: ShardId(0), chunk: ChunkId(chunk) }
    }

    fn chunk(lane: LaneId) -> Chunk {
        let payload = Payload { bytes: Bytes::from_static(b"gradient"), place: None };
        Chunk { payload, crc32: 1, loss_scale: 1.0, lane }
    }

    #[test]
    fn chunks_are_kept_until_their_step_is_committed() {
        let retained = Retained::default();
        for step in 1..=3 {
            for index in 0..4 {
                retained.keep(key(step, index), chunk((0, (index % 2) as usize)));
            }
        }
        retained.acknowledge(&key(1, 0));
        assert_eq!(retained.unacknowledged(), 11);
        assert!(retained.send(&key(1, 0)).is_some(), "an acknowledged chunk can still be sent again");
        retained.release(Step(2));
        assert!(retained.send(&key(2, 3)).is_none());
        assert!(retained.contains(&key(3, 0)));
        assert_eq!(retained.unacknowledged(), 4);
    }

    #[test]
    fn a_lane_resends_what_it_sent_in_order() {
        let retained = Retained::default();
        for index in 0..4 {
            retained.keep(key(1, index), chunk((0, (index % 2) as usize)));
        }
        for index in [2, 0, 1] {
            retained.send(&key(1, index));
        }
        retained.acknowledge(&key(1, 0));
        assert_eq!(retained.to_resend((0, 0)), [key(1, 0), key(1, 2)]);
        assert_eq!(retained.to_resend((0, 1)), [key(1, 1)], "chunk 3 still queues");
        assert!(retained.to_resend((1, 0)).is_empty());
    }

    #[test]
    fn a_payload_is_freed_with_its_step() {
        let retained = Retained::default();
        let payload = Bytes::from(vec![0u8; 16]);
        let kept = Payload { bytes: payload.clone(), place: None };
        retained.keep(key(1, 0), Chunk { payload: kept, ..chunk((0, 0)) });
        assert!(!payload.is_unique());
        retained.release(Step(1));
        assert!(payload.is_unique());
    }
}
