//! Stamps beside bytes that readers cannot be locked out of: bytes read between two equal stamps are of that
//! version.
//!
//! The writer sets the stamp to 0 before it changes the first byte, and to the version's once the last one is
//! written. A reader looks at the stamp, reads, and looks again. The read counts if both looks found the
//! version's stamp.

use std::sync::atomic::{
    AtomicU64,
    Ordering::{self, SeqCst},
};

/// An atomic, or a model's.
pub(crate) trait Stamp {
    fn load(&self, order: Ordering) -> u64;
    fn store(&self, value: u64, order: Ordering);
    fn fence(order: Ordering);
}

macro_rules! stamp {
    ($type:ty, $fence:path) => {
        impl Stamp for $type {
            fn load(&self, order: Ordering) -> u64 {
                self.load(order)
            }

            fn store(&self, value: u64, order: Ordering) {
                self.store(value, order);
            }

            fn fence(order: Ordering) {
                $fence(order);
            }
        }
    };
}

stamp!(AtomicU64, std::sync::atomic::fence);
#[cfg(loom)]
stamp!(loom::sync::atomic::AtomicU64, loom::sync::atomic::fence);

/// Sets the stamp, after all earlier writes of bytes and before all later ones.
///
/// The fences are sequentially consistent, since kernels write past the cache, which plain release does not
/// order.
pub(crate) fn publish<S: Stamp>(stamp: &S, value: u64) {
    S::fence(SeqCst);
    stamp.store(value, Ordering::Release);
    S::fence(SeqCst);
}

/// Returns the stamp, after all earlier reads of bytes and before all later ones.
pub(crate) fn look<S: Stamp>(stamp: &S) -> u64 {
    S::fence(SeqCst);
    stamp.load(SeqCst)
}
