//! The threads that sum and update, and the instruction set they use.

use longshore_proto::limits::BLOCK_ELEMENTS;
use rayon::{ThreadPool, ThreadPoolBuildError, ThreadPoolBuilder, prelude::*};

use crate::kernels::Isa;

/// Shared by all jobs of a server.
pub struct Compute {
    pool: ThreadPool,
    isa: Isa,
}

pub(super) const BLOCK: usize = BLOCK_ELEMENTS as usize;

impl Compute {
    /// An own pool: rayon's global one would be shared with whatever else is linked in, model arithmetic included.
    pub fn new(threads: usize, isa: Isa) -> Result<Compute, ThreadPoolBuildError> {
        let pool = ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|index| format!("update-{index}"))
            .build()?;
        Ok(Compute { pool, isa })
    }

    pub fn threads(&self) -> usize {
        self.pool.current_num_threads()
    }

    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Runs `block` on every item at once and returns the results in order.
    pub(super) fn blocks<T: Send, R: Send>(
        &self,
        items: Vec<T>,
        block: impl Fn(T) -> R + Sync + Send,
    ) -> Vec<R> {
        // One block a task: 64 blocks of a default shard spread evenly over any number of threads.
        self.pool.install(|| items.into_par_iter().map(block).collect())
    }
}
