//! The optimizer server without a network.
//!
//! Synchronous and deterministic: no tokio, no tonic, no clock in any decision. A [`Job`](job::Job) takes
//! events (chunks, commits, pulls) and hands out [`Work`](step::Work) for a compute thread. [`step::Machine`]
//! decides and [`kernels`] compute on [`threads`]. A [`tier`] holds the state, and [`checkpoint`] writes and
//! reads it.

pub mod admission;
pub mod checkpoint;
pub mod ids;
pub mod io;
pub mod job;
pub mod kernels;
pub mod record;
mod retired;
pub mod step;
pub mod threads;
pub mod tier;

/// Buffers and shared memory. Callers of the engine use the same types.
pub use longshore_memory as memory;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex whose data are valid at every instruction, so that a panic in another thread does not spread.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
