//! Which version to ask several servers for while training goes on.

use longshore_proto::{Fault, FaultKind};

/// Tries before giving up on a version that all servers can still give.
pub const TRIES: u32 = 8;

/// How far ahead of the newest version to ask. Servers reach a version one after the other, and one that has left it behind
/// refuses: then all are asked for one that is still ahead, further and further. First for one that is there: a job that
/// nobody trains has no other.
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
