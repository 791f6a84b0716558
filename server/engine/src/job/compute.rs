//! The threads that sum and update, and their instruction set. The server owns the pool, and each job has an account of
//! thread time.

use std::{io, sync::Arc};

use longshore_proto::limits::BLOCK_ELEMENTS;

use crate::{
    kernels::Isa,
    threads::{Account, ThreadPool},
};

/// The update threads and their instruction set. All jobs of a server share the threads, each by an account of its own.
pub struct Compute {
    pool: Arc<ThreadPool>,
    isa: Isa,
    account: Arc<Account>,
}

pub(super) const BLOCK: usize = BLOCK_ELEMENTS as usize;

impl Compute {
    pub fn new(threads: usize, isa: Isa) -> io::Result<Compute> {
        Ok(Compute { pool: Arc::new(ThreadPool::new(threads)?), isa, account: Account::new() })
    }

    /// The same threads for another job.
    pub fn for_job(&self) -> Compute {
        Compute { pool: Arc::clone(&self.pool), isa: self.isa, account: Account::new() }
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
        self.groups(vec![items], block, || ()).pop().expect("as many groups as were given")
    }

    /// Runs [`Compute::blocks`] for several shards at once. The calling thread runs `meanwhile` while the
    /// other threads begin.
    pub(super) fn groups<T: Send, R: Send>(
        &self,
        groups: Vec<Vec<T>>,
        block: impl Fn(T) -> R + Sync + Send,
        meanwhile: impl FnOnce(),
    ) -> Vec<Vec<R>> {
        self.pool.groups(&self.account, groups, block, meanwhile)
    }
}
