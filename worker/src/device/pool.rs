//! Host buffers that are used again and again: after the first step nothing is allocated any more. A buffer has its
//! lease in use and at rest, so that the budget shows what is really held.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use super::{Budget, Lease};
use crate::{
    error::Shortage,
    memfd::{Arena, Extent, Piece},
};

/// Clones share the buffers.
#[derive(Clone)]
pub struct BufferPool(Arc<Shelf>);

struct Shelf {
    budget: Budget,
    field: &'static str,
    /// Idle buffers by length. A job uses few lengths, mostly one chunk.
    idle: Mutex<HashMap<usize, Vec<LeasedBytes>>>,
    /// Where buffers come from that other processes may be given to read.
    arena: Option<Arena>,
}

struct LeasedBytes {
    bytes: Bytes,
    _lease: Lease,
}

enum Bytes {
    Own(Vec<u8>),
    Shared(Piece),
}

impl Bytes {
    fn get(&self) -> &[u8] {
        match self {
            Bytes::Own(bytes) => bytes,
            Bytes::Shared(piece) => piece.as_ref(),
        }
    }

    fn get_mut(&mut self) -> &mut [u8] {
        match self {
            Bytes::Own(bytes) => bytes,
            Bytes::Shared(piece) => piece.as_mut(),
        }
    }
}

impl BufferPool {
    /// `field` says what buffers are for when the budget refuses one.
    pub fn new(budget: Budget, field: &'static str) -> BufferPool {
        BufferPool(Arc::new(Shelf { budget, field, idle: Mutex::new(HashMap::new()), arena: None }))
    }

    /// A pool like [`BufferPool::new`]'s, whose buffers servers of this host can read, where the kernel allows it.
    pub(crate) fn shared(budget: Budget, field: &'static str) -> BufferPool {
        let arena = Some(Arena::default());
        BufferPool(Arc::new(Shelf { budget, field, idle: Mutex::new(HashMap::new()), arena }))
    }

    /// A buffer of exactly `bytes`, which holds whatever its last user left.
    pub fn take(&self, bytes: usize) -> Result<PooledBuffer, Shortage> {
        let found = self.lock().get_mut(&bytes).and_then(Vec::pop);
        let memory = match found {
            Some(memory) => memory,
            None => self.allocate(bytes)?,
        };
        Ok(PooledBuffer { memory: Some(memory), pool: self.clone() })
    }

    fn allocate(&self, bytes: usize) -> Result<LeasedBytes, Shortage> {
        let reserve = || self.0.budget.reserve(self.0.field, bytes as u64);
        // Idle buffers of other lengths make room before the budget refuses.
        let lease = reserve().or_else(|_| {
            self.lock().clear();
            reserve()
        })?;
        let shared = self.0.arena.as_ref().and_then(|arena| {
            let taken = arena.take(bytes);
            taken.inspect_err(|error| tracing::debug!(%error, "no shared memory for gradients")).ok()
        });
        let bytes = shared.map_or_else(|| Bytes::Own(vec![0; bytes]), Bytes::Shared);
        Ok(LeasedBytes { bytes, _lease: lease })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<usize, Vec<LeasedBytes>>> {
        // Nothing under this lock can leave the map half changed.
        self.0.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A buffer on loan, which goes back to its pool on drop. As `Bytes::from_owner` it goes back with the last clone.
pub struct PooledBuffer {
    /// It is None only while it is dropped.
    memory: Option<LeasedBytes>,
    pool: BufferPool,
}

impl PooledBuffer {
    /// Where other processes find it, if it was taken from a shared pool.
    pub(crate) fn place(&self) -> Option<(Arc<Extent>, u64)> {
        match &self.memory.as_ref()?.bytes {
            Bytes::Own(_) => None,
            Bytes::Shared(piece) => Some(piece.place()),
        }
    }

    /// Gives the buffer up as it is: other processes may go on reading it, and nobody here writes there any more.
    pub(crate) fn abandon(mut self) {
        if let Some(LeasedBytes { bytes: Bytes::Shared(piece), .. }) = self.memory.take() {
            piece.abandon();
        }
    }
}

impl AsRef<[u8]> for PooledBuffer {
    fn as_ref(&self) -> &[u8] {
        self.memory.as_ref().map_or(&[], |memory| memory.bytes.get())
    }
}

impl AsMut<[u8]> for PooledBuffer {
    fn as_mut(&mut self) -> &mut [u8] {
        self.memory.as_mut().map_or(&mut [], |memory| memory.bytes.get_mut())
    }
}

impl Drop for PooledBuffer {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            self.pool.lock().entry(memory.bytes.get().len()).or_default().push(memory);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_come_back_and_stay_counted() {
        let budget = Budget::new("host", 300);
        let pool = BufferPool::new(budget.clone(), "test");
        let first = pool.take(100).unwrap();
        let address = first.as_ref().as_ptr();
        drop(bytes::Bytes::from_owner(first));
        assert_eq!(budget.used(), 100);
        let again = pool.take(100).unwrap();
        assert_eq!(again.as_ref().as_ptr(), address);
        drop(again);
        // 250 bytes fit only once the idle 100 are given up.
        pool.take(250).unwrap();
        assert_eq!(budget.used(), 250);
        let _held = pool.take(250).unwrap();
        assert!(pool.take(100).is_err());
    }
}
