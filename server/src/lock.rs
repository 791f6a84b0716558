//! Locks. A thread that panics under a lock leaves a value that other threads can use. No statement under a lock of
//! this crate stops halfway through a change.

use std::sync::{Mutex, MutexGuard, PoisonError};

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
