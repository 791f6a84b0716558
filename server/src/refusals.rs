//! Counts of refusals by this process, by kind. Alerts watch CORRUPT for damaged bytes, and operators watch FORBIDDEN.

use std::sync::atomic::{AtomicU64, Ordering};

use longshore_proto::{Fault, FaultKind};
use longshore_wire as wire;
use tonic::Status;

/// Counters in the order of [`FaultKind::ALL`].
static REFUSED: [AtomicU64; FaultKind::ALL.len()] = [const { AtomicU64::new(0) }; _];

/// Counts a refused call or chunk. Code that refuses a call or chunk calls this function once.
pub(crate) fn count(fault: &Fault) {
    if let Some(kind) = FaultKind::ALL.iter().position(|kind| *kind == fault.kind) {
        REFUSED[kind].fetch_add(1, Ordering::Relaxed);
    }
}

pub(crate) fn status(fault: &Fault) -> Status {
    count(fault);
    wire::status(fault)
}

/// Yields the count of each kind.
pub(crate) fn counts() -> impl Iterator<Item = (FaultKind, u64)> {
    FaultKind::ALL.iter().zip(&REFUSED).map(|(kind, count)| (*kind, count.load(Ordering::Relaxed)))
}
