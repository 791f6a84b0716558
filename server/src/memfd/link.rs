//! The server's end of a link: one process of one rank, and the memory that it may refer to. Every number that
//! the process sends is checked here.

use std::{
    fmt,
    sync::{Arc, Mutex, Weak},
};

use longshore_engine::{
    job::Lent,
    memory::{Foreign, Source},
};
use longshore_proto::{ContributionChunk, Fault, FaultKind, Incarnation, Rank};
use longshore_wire::{
    memfd::{MAX_MEMORIES, stale},
    v1::MemfdPlace,
};

use crate::{jobs::JobHandle, lock::lock};

pub(crate) struct Link {
    pub(super) id: u64,
    pub(super) job: Weak<JobHandle>,
    rank: Rank,
    incarnation: Incarnation,
    memories: Mutex<Vec<Arc<Foreign>>>,
}

/// A payload in a worker's memory, checked to lie wholly inside that memory.
pub(crate) struct Payload {
    memory: Arc<Foreign>,
    offset: u64,
    bytes: u64,
}

impl fmt::Debug for Link {
    /// The id is omitted, since it is a secret between both ends.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", self.rank, self.incarnation)
    }
}

impl Link {
    pub(super) fn new(id: u64, job: Weak<JobHandle>, rank: Rank, incarnation: Incarnation) -> Link {
        Link { id, job, rank, incarnation, memories: Mutex::default() }
    }

    pub(super) fn is_of(&self, handle: &Arc<JobHandle>, rank: Rank) -> bool {
        self.rank == rank && Weak::ptr_eq(&self.job, &Arc::downgrade(handle))
    }

    /// Stores a worker's memory and returns its number.
    pub(super) fn take(&self, memory: Foreign) -> Result<u32, Fault> {
        let mut memories = lock(&self.memories);
        if memories.len() >= MAX_MEMORIES {
            let limit = format!("at most {MAX_MEMORIES}");
            let remedy = "use larger pieces of memory";
            return Err(Fault::new(
                FaultKind::Exhausted,
                "memfd.memories",
                memories.len() + 1,
                limit,
                remedy,
            ));
        }
        memories.push(Arc::new(memory));
        Ok(memories.len() as u32 - 1)
    }

    /// Returns a chunk's payload. The link must belong to the process that sends the chunk.
    pub(crate) fn payload(&self, place: &MemfdPlace, chunk: &ContributionChunk) -> Result<Payload, Fault> {
        let rank = chunk.contribution.rank;
        if rank != self.rank {
            let limit = format!("{}, whose link this is", self.rank);
            return Err(Fault::invalid("memfd.rank", rank, limit, "use the rank's own link"));
        }
        if chunk.incarnation != self.incarnation {
            let limit = format!("of incarnation {}", self.incarnation);
            return Err(stale(format!("of incarnation {}", chunk.incarnation), &limit));
        }
        let memories = lock(&self.memories);
        let Some(memory) = memories.get(place.memory as usize) else {
            let limit = format!("below {}, those of this link", memories.len());
            return Err(Fault::invalid("memfd.memory", place.memory, limit, "pass the memory first"));
        };
        if !memory.holds(place.offset, place.bytes) {
            let value = format!("{} bytes at {}", place.bytes, place.offset);
            let limit = format!("inside the memory's {}", memory.len());
            return Err(Fault::invalid("memfd.place", value, limit, "say where the payload is"));
        }
        Ok(Payload { memory: Arc::clone(memory), offset: place.offset, bytes: place.bytes })
    }
}

impl Payload {
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the payload as memory that kernels can read in place.
    pub(crate) fn into_lent(self) -> Arc<dyn Lent> {
        Arc::new(self)
    }

    /// Copies the payload's bytes from offset `from` into `target`. The worker may write the bytes during the copy.
    pub(crate) fn copy(&self, from: usize, target: &mut [u8]) {
        self.memory.source(self.offset + from as u64, target.len() as u64).copy_to(target);
    }
}

impl Lent for Payload {
    fn bytes(&self) -> Source<'_, u8> {
        self.memory.source(self.offset, self.bytes)
    }
}
