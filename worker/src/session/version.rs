//! Which version to ask several servers for while training goes on.

use longshore_proto::{Fault, FaultKind};

/// How many tries are made before giving up on a version that all servers can still give.
pub const TRIES: u32 = 8;

/// How far ahead of the newest version to ask. Servers reach a version one after the other, and a server that is past
/// the version refuses; then all are asked for one that is still ahead, further each time. The first try asks for one
/// that is there, since a job that nobody trains has no other.
pub fn lead(tried: u32) -> u64 {
    match tried {
        0 => 0,
        _ => 1 << (tried - 1),
    }
}

/// Whether a server was asked too late for a version.
pub fn has_passed(fault: &Fault) -> bool {
    fault.kind == FaultKind::Precondition && fault.field == "version"
}
