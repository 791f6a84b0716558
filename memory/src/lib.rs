//! Memory that more than one party uses: mappings, memory shared between processes, and work lent to threads.
//!
//! A Rust slice promises that its bytes do not change while it lives. So the writer of the bytes decides their type:
//!
//! | written by | type | how it is read |
//! |---|---|---|
//! | its owner alone | [`Region`] | as a slice |
//! | another process | [`Foreign`], [`Source`] | volatile copies, and kernels that load each element once |
//! | another thread of this process | [`SharedBytes`] | by the kernel, which is given the address |
//!
//! Only this crate makes mappings, and pointers into mappings.

#![allow(unsafe_code)]

mod copy;
mod file;
pub mod float;
mod foreign;
pub mod lend;
mod map;
#[cfg(all(test, loom))]
mod models;
mod region;
mod shared;
mod slab;
mod source;
mod traffic;

pub use copy::copy_past_caches;
pub use file::SharedFile;
pub use foreign::{Foreign, ForeignError};
pub use region::{AtomicWords, Mapping, Region};
pub use shared::{MOST_PARTS, Part, SharedBytes, write_parts};
pub use slab::{AllocationError, Near, Slab};
pub use source::{Element, Source};
pub use traffic::Traffic;

/// Limits glibc to two arenas. By default glibc makes eight a core, and each keeps the memory that its threads have
/// freed. A server's calls move from thread to thread. With eight arenas a core it kept 32 to 98 MB of messages, with
/// two 28 to 32 MB. Steps took as long with two. Other allocators are left as they are.
///
/// Call this before the process has other threads, whose arenas would stay.
pub fn few_arenas() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        const ARENAS: libc::c_int = 2;
        // SAFETY: mallopt takes two numbers, may be called from any thread, and refuses unknown parameters.
        let taken = unsafe { libc::mallopt(libc::M_ARENA_MAX, ARENAS) };
        if taken == 0 {
            tracing::debug!("the allocator keeps its own number of arenas");
        }
    }
}
