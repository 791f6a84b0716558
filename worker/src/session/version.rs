//! Chooses the version that several servers are asked for while training goes on.

use longshore_proto::{Fault, FaultKind};

/// Tries before giving up on a version that all servers can still give.
pub const TRIES: u32 = 8;

/// Returns how far ahead of the newest version to ask. Servers reach a version one after the other, and a server
/// past it refuses. Each further try asks for a version further ahead.
///
/// The first try asks for a version that is there, since a job without training has no other.
pub fn lead(tried: u32) -> u64 {
    match tried {
        0 => 0,
        _ => 1 << (tried - 1),
    }
}

/// Returns true if a server was asked too late for a version.
pub fn has_passed(fault: &Fault) -> bool {
    fault.kind == FaultKind::Precondition && fault.field == "version"
}

/// Returns true if a server makes as many checkpoints as it can at once: another try has room soon.
pub fn is_busy(fault: &Fault) -> bool {
    fault.kind == FaultKind::Exhausted && fault.field == "checkpoints"
}
