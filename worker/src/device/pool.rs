//! A pool of host buffers: after the first step nothing is allocated any more. Idle buffers keep their lease, so the
//! budget shows the memory that is really held. All threads of a session share a pool.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use super::{Budget, Lease};
use crate::{
    error::Shortage,
    lock,
    memfd::{Arena, Extent, GradientMemory, Piece},
};

/// A pool of buffers. Clones share it.
#[derive(Clone)]
pub struct BufferPool(Arc<Shelf>);

struct Shelf {
    budget: Budget,
    field: &'static str,
    rest: Mutex<Rest>,
    /// True if idle buffers are freed: the pool then holds no more than its peak of bytes in use.
    is_tight: bool,
    /// The source of buffers that other processes may read.
    arena: Option<Arena>,
}

/// Idle buffers, and counters of the pool.
#[derive(Default)]
struct Rest {
    /// Idle buffers by length. A job uses few lengths, mostly one chunk.
    idle: HashMap<usize, Vec<LeasedBytes>>,
    idle_bytes: u64,
    in_use: u64,
    /// Peaks since the pool was made or emptied: bytes in use, and bytes held (in use and idle).
    most_in_use: u64,
    most: u64,
}

impl Rest {
    fn take(&mut self, bytes: usize) -> Option<LeasedBytes> {
        let found = self.idle.get_mut(&bytes).and_then(Vec::pop);
        self.idle_bytes -= found.as_ref().map_or(0, |_| bytes as u64);
        found
    }

    /// Notes that `bytes` more are in use.
    fn uses(&mut self, bytes: usize) {
        self.in_use += bytes as u64;
        self.most_in_use = self.most_in_use.max(self.in_use);
    }

    /// Takes idle buffers out until the pool holds no more than `most_in_use`.
    fn surplus(&mut self) -> Vec<LeasedBytes> {
        let mut surplus = Vec::new();
        while self.in_use + self.idle_bytes > self.most_in_use {
            let Some(length) =
                self.idle.iter().find_map(|(length, idle)| (!idle.is_empty()).then_some(*length))
            else {
                break;
            };
            surplus.extend(self.take(length));
        }
        surplus
    }
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
    /// Makes a pool. `field` names the use of the buffers if the budget refuses one.
    pub fn new(budget: Budget, field: &'static str) -> BufferPool {
        BufferPool::of(budget, field, false, None)
    }

    /// Makes a pool for buffers of many lengths: idle buffers are freed to make room for other lengths.
    pub(crate) fn tight(budget: Budget, field: &'static str) -> BufferPool {
        BufferPool::of(budget, field, true, None)
    }

    /// Makes a pool of buffers that servers of this host can read, if the kernel allows it.
    pub(crate) fn shared(budget: Budget, field: &'static str) -> BufferPool {
        BufferPool::of(budget, field, false, Some(Arena::default()))
    }

    fn of(budget: Budget, field: &'static str, is_tight: bool, arena: Option<Arena>) -> BufferPool {
        BufferPool(Arc::new(Shelf { budget, field, rest: Mutex::default(), is_tight, arena }))
    }

    /// Keeps the pages of all buffers in place while the returned value lives. None if the pool is not shared.
    pub(crate) fn kept(&self) -> Option<GradientMemory> {
        self.0.arena.as_ref().map(Arena::kept)
    }

    /// The most bytes held since the pool was made or emptied.
    pub(crate) fn most(&self) -> u64 {
        lock(&self.0.rest).most
    }

    /// Frees the idle buffers, and resets the peaks.
    pub(crate) fn empty(&self) {
        let mut rest = lock(&self.0.rest);
        let idle = std::mem::take(&mut rest.idle);
        (rest.idle_bytes, rest.most_in_use, rest.most) = (0, rest.in_use, rest.in_use);
        drop(rest);
        drop(idle); // memory is given back outside the lock
    }

    /// Takes a buffer of exactly `bytes`. Its contents are those of the last use.
    pub fn take(&self, bytes: usize) -> Result<PooledBuffer, Shortage> {
        let (found, surplus) = {
            let mut rest = lock(&self.0.rest);
            let found = rest.take(bytes);
            rest.uses(bytes);
            let surplus = if self.0.is_tight { rest.surplus() } else { Vec::new() };
            rest.most = rest.most.max(rest.in_use + rest.idle_bytes);
            (found, surplus)
        };
        drop(surplus);
        let memory = match found {
            Some(memory) => memory,
            None => self.allocate(bytes).inspect_err(|_| lock(&self.0.rest).in_use -= bytes as u64)?,
        };
        Ok(PooledBuffer { memory: Some(memory), pool: self.clone() })
    }

    fn allocate(&self, bytes: usize) -> Result<LeasedBytes, Shortage> {
        let reserve = || self.0.budget.reserve(self.0.field, bytes as u64);
        // Idle buffers of other lengths are freed before the budget refuses.
        let lease = reserve().or_else(|_| {
            let idle = {
                let mut rest = lock(&self.0.rest);
                rest.idle_bytes = 0;
                std::mem::take(&mut rest.idle)
            };
            drop(idle);
            reserve()
        })?;
        let shared = self.0.arena.as_ref().and_then(|arena| {
            let taken = arena.take(bytes);
            taken.inspect_err(|error| tracing::debug!(%error, "no shared memory for gradients")).ok()
        });
        let bytes = shared.map_or_else(|| Bytes::Own(vec![0; bytes]), Bytes::Shared);
        Ok(LeasedBytes { bytes, _lease: lease })
    }
}

/// A buffer from a pool. Dropping the buffer returns it to the pool. As the owner of `Bytes`, it returns with their
/// last clone.
pub struct PooledBuffer {
    /// None only while the buffer is dropped.
    memory: Option<LeasedBytes>,
    pool: BufferPool,
}

impl PooledBuffer {
    /// The place where other processes map this buffer, if the pool is shared.
    pub(crate) fn place(&self) -> Option<(Arc<Extent>, u64)> {
        match &self.memory.as_ref()?.bytes {
            Bytes::Own(_) => None,
            Bytes::Shared(piece) => Some(piece.place()),
        }
    }

    /// Leaves the buffer as it is: other processes may go on reading it, and this process never writes to the buffer
    /// again.
    pub(crate) fn abandon(mut self) {
        let Some(memory) = self.memory.take() else { return };
        lock(&self.pool.0.rest).in_use -= memory.bytes.get().len() as u64;
        if let LeasedBytes { bytes: Bytes::Shared(piece), .. } = memory {
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
            let length = memory.bytes.get().len();
            let mut rest = lock(&self.pool.0.rest);
            rest.in_use -= length as u64;
            rest.idle_bytes += length as u64;
            rest.idle.entry(length).or_default().push(memory);
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
        // 250 bytes fit only after the 100 idle bytes are freed.
        pool.take(250).unwrap();
        assert_eq!(budget.used(), 250);
        let _held = pool.take(250).unwrap();
        assert!(pool.take(100).is_err());
    }
    #[test]
    fn a_tight_pool_keeps_no_more_than_was_in_use_at_once() {
        let budget = Budget::unlimited("host");
        let pool = BufferPool::tight(budget.clone(), "test");
        let both = (pool.take(100).unwrap(), pool.take(20).unwrap());
        drop(both);
        assert_eq!((budget.used(), pool.most()), (120, 120));
        for length in [30, 40, 50, 60, 100, 20] {
            drop(pool.take(length).unwrap());
            assert!(budget.used() <= 120, "{} after {length}", budget.used());
        }
        assert_eq!(pool.most(), 120);
        let held = pool.take(70).unwrap();
        pool.empty();
        assert_eq!((budget.used(), pool.most()), (70, 70));
        drop(held);
        drop(pool.take(10).unwrap());
        assert_eq!((budget.used(), pool.most()), (10, 70));
    }
}
