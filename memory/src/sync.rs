//! What loom's models replace: atomics and parking.

#[cfg(not(loom))]
pub(crate) use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread::{self, Thread},
};

#[cfg(loom)]
pub(crate) use loom::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread::{self, Thread},
};
