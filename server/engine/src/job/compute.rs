//! The threads that sum and update, and the instruction set that they use.

use std::io;

use longshore_proto::limits::BLOCK_ELEMENTS;

use crate::{kernels::Isa, threads::ThreadPool};

/// The update threads and their instruction set. All jobs of a server share them.
pub struct Compute {
    pool: ThreadPool,
    isa: Isa,
}

pub(super) const BLOCK: usize = BLOCK_ELEMENTS as usize;

impl Compute {
    pub fn new(threads: usize, isa: Isa) -> io::Result<Compute> {
        Ok(Compute { pool: ThreadPool::new(threads)?, isa })
    }

    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    pub fn isa(&self) -> Isa {
        self.isa
    }

    pub fn pool(&self) -> &ThreadPool {
        &self.pool
    }

    /// Runs `block` on every item at once and returns the results in order. A task is one block: the 64 blocks of a
    /// default shard spread evenly over any number of threads.
    pub(crate) fn blocks<T: Send, R: Send>(
        &self,
        items: Vec<T>,
        block: impl Fn(T) -> R + Sync + Send,
    ) -> Vec<R> {
        self.pool.blocks(items, block)
    }

    /// Does for several shards what [`Compute::blocks`] does for one. The calling thread runs `meanwhile` while the
    /// other threads begin.
    pub(super) fn groups<T: Send, R: Send>(
        &self,
        groups: Vec<Vec<T>>,
        block: impl Fn(T) -> R + Sync + Send,
        meanwhile: impl FnOnce(),
    ) -> Vec<Vec<R>> {
        self.pool.groups(groups, block, meanwhile)
    }
}
