//! Payloads through shared memory (longshore/v1/memfd.proto): the socket that passes descriptors.

mod packet;

pub use packet::{Listener, Packet, Socket, decode};

use std::os::fd::AsFd;

use longshore_memory::{Foreign, ForeignError};
use longshore_proto::fault::{Fault, FaultKind};

/// Largest piece of a worker's memory that is mapped as one.
pub const MAX_MEMORY_BYTES: u64 = 1 << 30;
/// Most pieces of one link: a terabyte of gradients retained by one process.
pub const MAX_MEMORIES: usize = 1024;

/// Returns the id of the running kernel. Processes with the same id share a host, or are containers of it.
pub fn boot_id() -> Option<String> {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(id.trim().to_string())
}

pub fn uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Maps the memory that the peer passed.
///
/// # Errors
/// `Invalid`, naming the violated requirement: see [`Foreign::map`].
pub fn map(descriptor: impl AsFd, bytes: u64, most: u64) -> Result<Foreign, Fault> {
    let remedy = "pass a memfd_create file sealed with F_SEAL_SHRINK and F_SEAL_GROW";
    let invalid = |error: ForeignError| Fault::invalid("memfd.memory", error.found, error.limit, remedy);
    Foreign::map(descriptor, bytes, most).map_err(invalid)
}

/// Returns the fault of a missing or closed link, and of memory that does not match the request. The sender should
/// make a new link.
pub fn stale(value: impl std::fmt::Display, limit: &str) -> Fault {
    Fault::new(FaultKind::Precondition, STALE, value, limit, "link again, or send payloads inline")
}

/// Field of [`stale`].
pub const STALE: &str = "memfd.link";
