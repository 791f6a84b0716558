//! Host buffers that go round: after the first step nothing is allocated any more. Each carries its lease, in use and
//! at rest, so that the budget shows what is really held.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use super::{Budget, Lease};
use crate::error::Shortage;

/// Clones share the buffers.
#[derive(Clone)]
pub struct Pool(Arc<Shelf>);

struct Shelf {
    budget: Budget,
    field: &'static str,
    /// By length: a job uses few lengths, mostly one chunk.
    idle: Mutex<HashMap<usize, Vec<Memory>>>,
}

struct Memory {
    bytes: Vec<u8>,
    _lease: Lease,
}

impl Pool {
    /// `field` says what for, when the budget refuses.
    pub fn new(budget: Budget, field: &'static str) -> Pool {
        Pool(Arc::new(Shelf { budget, field, idle: Mutex::new(HashMap::new()) }))
    }

    /// A buffer of exactly `bytes`, holding whatever its last user left.
    pub fn take(&self, bytes: usize) -> Result<PooledBuffer, Shortage> {
        let found = self.lock().get_mut(&bytes).and_then(Vec::pop);
        let memory = match found {
            Some(memory) => memory,
            None => self.allocate(bytes)?,
        };
        Ok(PooledBuffer { memory: Some(memory), pool: self.clone() })
    }

    fn allocate(&self, bytes: usize) -> Result<Memory, Shortage> {
        let reserve = || self.0.budget.reserve(self.0.field, bytes as u64);
        // Idle buffers of other lengths make room before the budget refuses.
        let lease = reserve().or_else(|_| {
            self.lock().clear();
            reserve()
        })?;
        Ok(Memory { bytes: vec![0; bytes], _lease: lease })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<usize, Vec<Memory>>> {
        // Nothing under this lock can leave the map half changed.
        self.0.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A buffer on loan; it goes back to its pool on drop. As `Bytes::from_owner` it goes back with the last clone.
pub struct PooledBuffer {
    /// None only while dropping.
    memory: Option<Memory>,
    pool: Pool,
}

impl AsRef<[u8]> for PooledBuffer {
    fn as_ref(&self) -> &[u8] {
        self.memory.as_ref().map_or(&[], |memory| &memory.bytes)
    }
}

impl AsMut<[u8]> for PooledBuffer {
    fn as_mut(&mut self) -> &mut [u8] {
        self.memory.as_mut().map_or(&mut [], |memory| &mut memory.bytes)
    }
}

impl Drop for PooledBuffer {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            self.pool.lock().entry(memory.bytes.len()).or_default().push(memory);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_come_back_and_stay_counted() {
        let budget = Budget::new("host", 300);
        let pool = Pool::new(budget.clone(), "test");
        let first = pool.take(100).unwrap();
        let address = first.as_ref().as_ptr();
        drop(bytes::Bytes::from_owner(first));
        assert_eq!(budget.used(), 100);
        let again = pool.take(100).unwrap();
        assert_eq!(again.as_ref().as_ptr(), address);
        drop(again);
        // 250 fit only once the idle 100 are given up.
        pool.take(250).unwrap();
        assert_eq!(budget.used(), 250);
        let _held = pool.take(250).unwrap();
        assert!(pool.take(100).is_err());
    }
}
