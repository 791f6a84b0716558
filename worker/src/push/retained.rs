//! Retains gradient chunks until no server can need them. After a break or a server's restart they are sent again.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

use bytes::Bytes;
use longshore_proto::{ChunkId, MicroStep, Reads, ServerId, ShardId, Step};
use longshore_wire::v1::PushResult;

use crate::{device::PooledBuffer, lock, memfd::Extent};

/// Key of a chunk of this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkKey {
    pub step: Step,
    pub micro_step: MicroStep,
    pub shard: ShardId,
    pub chunk: ChunkId,
}

impl From<&PushResult> for ChunkKey {
    fn from(result: &PushResult) -> ChunkKey {
        ChunkKey {
            step: Step(result.step),
            micro_step: MicroStep(result.micro_step),
            shard: ShardId(result.shard),
            chunk: ChunkId(result.chunk),
        }
    }
}

/// A data connection of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LaneId {
    pub(crate) server: ServerId,
    pub(crate) connection: usize,
}

/// A chunk's bytes, and their place in shared memory, from which servers of this host read them.
#[derive(Clone)]
pub(crate) struct Payload {
    pub(crate) bytes: Bytes,
    pub(crate) place: Option<(Arc<Extent>, u64)>,
    /// Set once no server reads a lent payload any more. None for other payloads.
    over: Option<Arc<AtomicBool>>,
}

impl From<PooledBuffer> for Payload {
    fn from(buffer: PooledBuffer) -> Payload {
        let place = buffer.place();
        Payload { bytes: Bytes::from_owner(buffer), place, over: None }
    }
}

impl Payload {
    /// Makes a payload that servers read in this process's memory.
    pub(super) fn lent(buffer: PooledBuffer) -> Payload {
        let (place, over) = (buffer.place(), Arc::new(AtomicBool::new(false)));
        let lent = Lent { buffer: Some(buffer), over: Arc::clone(&over) };
        Payload { bytes: Bytes::from_owner(lent), place, over: Some(over) }
    }
}

/// A buffer that servers may be reading. The buffer returns to its pool only once no server reads it.
struct Lent {
    /// None only while the buffer is dropped.
    buffer: Option<PooledBuffer>,
    over: Arc<AtomicBool>,
}

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        self.buffer.as_ref().map_or(&[], PooledBuffer::as_ref)
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take()
            && !self.over.load(Ordering::Acquire)
        {
            // The session ends while an update may still read the buffer. The memory is freed once the last server no
            // longer maps it.
            buffer.abandon();
        }
    }
}

/// A chunk ready to send. Clones share the payload.
#[derive(Clone)]
pub(crate) struct Chunk {
    pub(crate) payload: Payload,
    /// CRC-32 of the payload. Meaningless for a lent chunk, whose bytes are not sent.
    pub(crate) crc32: u32,
    pub(crate) loss_scale: f64,
    /// The version that the gradient was computed with.
    pub(crate) reads: Reads,
}

impl Chunk {
    pub(crate) fn is_lent(&self) -> bool {
        self.payload.over.is_some()
    }
}

struct Entry {
    chunk: Chunk,
    /// A copy for each holder of the shard.
    copies: Vec<Sending>,
}

/// State of a chunk on its way to one server.
struct Sending {
    lane: LaneId,
    sent: bool,
    acknowledged: bool,
}

impl Entry {
    fn not_needed(self) -> Entry {
        if let Some(over) = &self.chunk.payload.over {
            over.store(true, Ordering::Release);
        }
        self
    }
}

/// Chunks that a server may still need, by key. Chunks stay until their step is decided, lent chunks until their
/// update is done.
#[derive(Default)]
pub(crate) struct Retained(Mutex<Entries>);

#[derive(Default)]
struct Entries {
    by_key: BTreeMap<ChunkKey, Entry>,
    /// No server asks again for chunks of steps up to this one.
    decided: Step,
    /// Updates of steps up to this one are done: all weights that this step made have arrived here.
    updated: Step,
}

impl Entries {
    /// Returns the chunk, or the lent gradient of its whole shard.
    fn find(&mut self, key: &ChunkKey) -> Option<&mut Entry> {
        let whole = ChunkKey { chunk: ChunkId(0), ..*key };
        let held = match self.by_key.get(&whole).is_some_and(|entry| entry.chunk.is_lent()) {
            true => whole,
            false => *key,
        };
        self.by_key.get_mut(&held)
    }

    fn free(&mut self) -> Vec<Entry> {
        let (decided, updated) = (self.decided, self.updated);
        let over = |key: &ChunkKey, entry: &mut Entry| {
            key.step <= decided && (!entry.chunk.is_lent() || key.step <= updated)
        };
        self.by_key.extract_if(..=last_of(decided), over).map(|(_, entry)| entry.not_needed()).collect()
    }
}

fn last_of(step: Step) -> ChunkKey {
    ChunkKey { step, micro_step: MicroStep(u32::MAX), shard: ShardId(u32::MAX), chunk: ChunkId(u32::MAX) }
}

impl Retained {
    pub(crate) fn keep(&self, key: ChunkKey, chunk: Chunk, lanes: &[LaneId]) {
        let sending = |&lane: &LaneId| Sending { lane, sent: false, acknowledged: false };
        let copies = lanes.iter().map(sending).collect();
        lock(&self.0).by_key.insert(key, Entry { chunk, copies });
    }

    /// Returns a chunk to send now to a server; None if its step has been committed meanwhile.
    pub(crate) fn send(&self, key: &ChunkKey, server: ServerId) -> Option<Chunk> {
        lock(&self.0).find(key).map(|entry| {
            let copies = entry.copies.iter_mut().filter(|copy| copy.lane.server == server);
            copies.for_each(|copy| copy.sent = true);
            entry.chunk.clone()
        })
    }

    pub(crate) fn contains(&self, key: &ChunkKey) -> bool {
        lock(&self.0).find(key).is_some()
    }

    pub(crate) fn acknowledge(&self, key: &ChunkKey, server: ServerId) {
        if let Some(entry) = lock(&self.0).find(key) {
            let copies = entry.copies.iter_mut().filter(|copy| copy.lane.server == server);
            copies.for_each(|copy| copy.acknowledged = true);
        }
    }

    /// Returns the chunks that a lane sends again after its connection broke: every sent chunk, acknowledged or not. A
    /// restarted server has forgotten what it acknowledged. Another server acknowledges the duplicates. Chunks that
    /// still wait in the lane's queue are not returned.
    pub(crate) fn to_resend(&self, lane: LaneId) -> Vec<ChunkKey> {
        let mut entries = lock(&self.0);
        let again = |(key, entry): (&ChunkKey, &mut Entry)| {
            let copy = entry.copies.iter_mut().find(|copy| copy.sent && copy.lane == lane)?;
            copy.acknowledged = false;
            Some(*key)
        };
        entries.by_key.iter_mut().filter_map(again).collect()
    }

    /// Returns true if some chunk that a lane has sent is not acknowledged yet.
    pub(crate) fn owes(&self, lane: LaneId) -> bool {
        let owed = |copy: &Sending| copy.sent && !copy.acknowledged && copy.lane == lane;
        lock(&self.0).by_key.values().any(|entry| entry.copies.iter().any(owed))
    }

    /// The newest step with a chunk; 0 without one.
    pub(crate) fn newest(&self) -> u64 {
        lock(&self.0).by_key.keys().next_back().map_or(0, |key| key.step.0)
    }

    /// Number of chunks that are not acknowledged.
    pub(crate) fn unacknowledged(&self) -> usize {
        let is_open = |entry: &&Entry| entry.copies.iter().any(|copy| !copy.acknowledged);
        lock(&self.0).by_key.values().filter(is_open).count()
    }

    /// Returns true if servers may be reading gradients in this process.
    pub(crate) fn is_lending(&self) -> bool {
        lock(&self.0).by_key.values().any(|entry| entry.chunk.is_lent())
    }

    /// Frees the chunks of steps up to the committed `step`. Lent chunks stay.
    pub(crate) fn release(&self, step: Step) {
        self.free(|entries| entries.decided = entries.decided.max(step));
    }

    /// Notes that all weights made by `step` have arrived: no server reads gradients of steps up to this one. Lent
    /// chunks are freed once their step is committed, too.
    pub(crate) fn updated(&self, step: Step) {
        self.free(|entries| entries.updated = entries.updated.max(step));
    }

    fn free(&self, tell: impl FnOnce(&mut Entries)) {
        let mut entries = lock(&self.0);
        tell(&mut entries);
        let freed = entries.free();
        drop(entries);
        drop(freed); // buffers go back to their pool outside the lock
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::device::{Budget, BufferPool};

    fn key(step: u64, chunk: u32) -> ChunkKey {
        ChunkKey { step: Step(step), micro_step: MicroStep(0), shard: ShardId(0), chunk: ChunkId(chunk) }
    }

    fn lane(server: u32, connection: usize) -> LaneId {
        LaneId { server: ServerId(server), connection }
    }

    fn chunk() -> Chunk {
        let payload = Payload { bytes: Bytes::from_static(b"gradient"), place: None, over: None };
        Chunk { payload, crc32: 1, loss_scale: 1.0, reads: Reads::default() }
    }

    #[test]
    fn chunks_are_kept_until_their_step_is_committed() {
        let retained = Retained::default();
        for step in 1..=3 {
            for index in 0..4 {
                retained.keep(key(step, index), chunk(), &[lane(0, (index % 2) as usize)]);
            }
        }
        retained.acknowledge(&key(1, 0), ServerId(0));
        assert_eq!(retained.unacknowledged(), 11);
        assert!(
            retained.send(&key(1, 0), ServerId(0)).is_some(),
            "an acknowledged chunk can still be sent again"
        );
        retained.release(Step(2));
        assert!(retained.send(&key(2, 3), ServerId(0)).is_none());
        assert!(retained.contains(&key(3, 0)));
        assert_eq!(retained.unacknowledged(), 4);
    }

    #[test]
    fn a_lane_resends_what_it_sent_in_order() {
        let retained = Retained::default();
        for index in 0..4 {
            retained.keep(key(1, index), chunk(), &[lane(0, (index % 2) as usize)]);
        }
        for index in [2, 0, 1] {
            retained.send(&key(1, index), ServerId(0));
        }
        retained.acknowledge(&key(1, 0), ServerId(0));
        assert!(
            retained.owes(lane(0, 1)) && !retained.owes(lane(1, 0)),
            "nothing was sent over the last one"
        );
        retained.acknowledge(&key(1, 2), ServerId(0));
        assert!(!retained.owes(lane(0, 0)));
        assert_eq!(retained.to_resend(lane(0, 0)), [key(1, 0), key(1, 2)]);
        assert!(retained.owes(lane(0, 0)), "a server that restarted has forgotten both");
        assert_eq!(retained.to_resend(lane(0, 1)), [key(1, 1)], "chunk 3 still queues");
        assert!(retained.to_resend(lane(1, 0)).is_empty());
    }

    #[test]
    fn what_is_lent_is_freed_once_its_update_is_done_and_else_left_alone() {
        let budget = Budget::new("host", 1 << 20);
        let pool = BufferPool::shared(budget.clone(), "test");
        let retained = Retained::default();
        let lend = |step| {
            let mut buffer = pool.take(4096).unwrap();
            buffer.as_mut().fill(step as u8);
            let place = buffer.place().unwrap();
            retained.keep(key(step, 0), Chunk { payload: Payload::lent(buffer), ..chunk() }, &[lane(0, 0)]);
            place
        };
        let (first, second) = (lend(1), lend(2));
        assert!(retained.contains(&key(1, 3)), "any chunk of the shard is found in the whole");
        retained.release(Step(2));
        assert!(retained.contains(&key(1, 0)) && retained.contains(&key(2, 0)), "decided is not updated");
        retained.updated(Step(1));
        assert!(!retained.contains(&key(1, 0)));
        assert_eq!(pool.take(4096).unwrap().place().unwrap().1, first.1, "the first buffer is used again");
        // The session ends while a server may read the second buffer.
        drop(retained);
        let (extent, offset) = second;
        let mut seen = [0; 4096];
        rustix::io::pread(extent.as_fd(), &mut seen[..], offset).unwrap();
        assert!(seen.iter().all(|&byte| byte == 2));
        assert_eq!(budget.used(), 4096, "it is no more of this pool");
    }
}
